"""Completion of verbs, flags, keys and their values: `python -m t5x_diffeq --completion`.

The script contains every name, so that completion starts no Python. It completes the words after
`python -m t5x_diffeq.VERB` and `python -m t5x_diffeq VERB`, and leaves every other use of python
to the shell.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime.command_line import add_common_flags
from t5x_diffeq.runtime.config import KEYS
from t5x_diffeq.runtime.keys.values import Values

# The dictionary CHOICES of a verb's file has the values of flags by the flag's name; the values of
# the first argument are under this name.
FIRST_ARGUMENT = ""
_SCRIPT = """\
# Completes python -m t5x_diffeq.VERB in bash and zsh; put this line into ~/.bashrc or ~/.zshrc:
#   source <(python -m t5x_diffeq --completion)
[ -z "${{ZSH_VERSION:-}}" ] || {{ autoload -Uz compinit bashcompinit && compinit && bashcompinit; }}
_t5x_diffeq() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" word words="" head=""
  word="${{line##* }}"
  COMPREPLY=()
  case "$line" in
    *" -m t5x_diffeq"[." "]*" "*)
      line="${{line#* -m t5x_diffeq?}}"
      case "${{line%% *}} $word" in
{values}
        *=*) return 0 ;;
        *" -"*)
          case "${{line%% *}}" in
{flags}
          esac ;;
      esac
      [ -n "$words" ] || return 0
      if [[ "$word" == *=* ]]; then
        # bash completes what follows the equals sign alone, unless that is no border of words.
        [[ -z "${{ZSH_VERSION:-}}" && "${{COMP_WORDBREAKS-=}}" == *=* ]] || head="${{word%%=*}}="
        word="${{word#*=}}"
      fi ;;
    *" -m t5x_diffeq "*) words="{names}" ;;
    *" -m "*) words="{verbs}" ;;
  esac
  COMPREPLY=($(compgen -P "$head" -W "$words" -- "$word"))
  [[ "${{COMPREPLY[0]:-}}" != *= ]] || compopt -o nospace 2>/dev/null || true
}}
complete -o bashdefault -o default -F _t5x_diffeq python python3
"""


def script(verbs: Sequence[str]) -> str:
    """The shell script."""
    flag_lines = [f'            {verb}) words="{" ".join(_words_of(verb))}" ;;' for verb in verbs]
    values = {f'*" --config.{name}="*': _choices_of(key.values) for name, key in KEYS.items()}
    for verb in verbs:
        for name, choices in getattr(_module_of(verb), "CHOICES", {}).items():
            is_word = name == FIRST_ARGUMENT
            pattern = f'"{verb} "|"{verb} "[!-]*' if is_word else f'"{verb} --{name}="*'
            values[pattern] = choices
    return _SCRIPT.format(
        flags="\n".join(flag_lines),
        values="\n".join(
            f'        {pattern}) words="{" ".join(choices)}" ;;'
            for pattern, choices in values.items()
            if choices
        ),
        names=" ".join(verbs),
        verbs=" ".join(f"t5x_diffeq.{verb}" for verb in verbs),
    )


def _module_of(verb: str) -> ModuleType:
    return importlib.import_module(f"t5x_diffeq.cli.{verb}")


def _choices_of(values: Values) -> list[str]:
    """The values that a key can take, if they can be listed; a colon is a border of words."""
    if values.type is bool:
        return ["True", "False"]
    return [each for each in values.choices if ":" not in each and each != "c/N"]


def _words_of(verb: str) -> list[str]:
    """The verb's flags, and the keys of its config if it has one."""
    verb_flags = _module_of(verb).FLAGS
    add_common_flags(verb_flags)
    switches = [name for name in verb_flags if isinstance(verb_flags[name], flags.BooleanFlag)]
    words = [f"--{name}" if name in switches else f"--{name}=" for name in verb_flags]
    if any(config_flags.is_config_flag(verb_flags[name]) for name in verb_flags):
        words += [f"--config.{key}=" for key in KEYS]
    return ["--help", *words]
