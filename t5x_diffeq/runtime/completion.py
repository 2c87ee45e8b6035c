"""Completion of verbs, flags and config keys in bash and zsh: `python -m t5x_diffeq --completion`.

The script contains every name, so that completion starts no Python. It completes the words after
`python -m t5x_diffeq.VERB` and `python -m t5x_diffeq VERB`, and leaves every other use of python
to the shell.
"""

import importlib
from collections.abc import Sequence

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime.command_line import add_common_flags
from t5x_diffeq.runtime.config import KEYS

_SCRIPT = """\
# Completes python -m t5x_diffeq.VERB in bash and zsh; put this line into ~/.bashrc or ~/.zshrc:
#   source <(python -m t5x_diffeq --completion)
[ -z "${{ZSH_VERSION:-}}" ] || {{ autoload -Uz compinit bashcompinit && compinit && bashcompinit; }}
_t5x_diffeq() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" word words=""
  word="${{line##* }}"
  COMPREPLY=()
  case "$line" in
    *" -m t5x_diffeq"[." "]*" "*)
      [[ "$word" == -* && "$word" != *=* ]] || return 0
      line="${{line#* -m t5x_diffeq?}}"
      case "${{line%% *}}" in
{flags}
      esac ;;
    *" -m t5x_diffeq "*) words="{names}" ;;
    *" -m "*) words="{verbs}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ "${{COMPREPLY[0]:-}}" != *= ]] || compopt -o nospace 2>/dev/null || true
}}
complete -o bashdefault -o default -F _t5x_diffeq python python3
"""


def script(verbs: Sequence[str]) -> str:
    """The shell script."""
    lines = (f'        {verb}) words="{" ".join(_words_of(verb))}" ;;' for verb in verbs)
    modules = " ".join(f"t5x_diffeq.{verb}" for verb in verbs)
    return _SCRIPT.format(flags="\n".join(lines), names=" ".join(verbs), verbs=modules)


def _words_of(verb: str) -> list[str]:
    """The verb's flags, and the keys of its config if it has one."""
    own = importlib.import_module(f"t5x_diffeq.cli.{verb}").FLAGS
    add_common_flags(own)
    switches = [name for name in own if isinstance(own[name], flags.BooleanFlag)]
    words = [f"--{name}" if name in switches else f"--{name}=" for name in own]
    if any(config_flags.is_config_flag(own[name]) for name in own):
        words += [f"--config.{key}=" for key in KEYS]
    return ["--help", *words]
