"""How every verb starts and ends: its flags and config, its help, its exit status.

0    done
1    the run failed
2    the arguments, the config or the input is invalid
42   saved on preemption: run the same command again
130  stopped by Ctrl-C, saved
143  ended by SIGTERM before the data was prepared: run the same command again
175  infrastructure failure (a process, link, device or bucket): run the same command again

If there are several processes, all end with the status and the last line of the first that fails
(see `failures`).

Nothing here imports JAX before the flags and the config are known to be valid, and a verb's file
imports it only within functions, so that `--help` and a mistyped flag or key are answered at once.
"""

import atexit
import importlib
import os
import re
import shutil
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import NoReturn

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.cli import VERBS
from t5x_diffeq.cli.failures import end_of, fail, fail_to_write, find_peers
from t5x_diffeq.cli.flag_values import given_keys
from t5x_diffeq.cli.quiet_libraries import silence_libraries
from t5x_diffeq.cli.verb_flags import WordsParser
from t5x_diffeq.cluster import tpu_hosts
from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE
from t5x_diffeq.config import mistakes, plugins
from t5x_diffeq.config.config import check_complete, check_values
from t5x_diffeq.config.config_files import CONFIGS, config_file, flatten
from t5x_diffeq.config.unread import notes
from t5x_diffeq.system import console, environment
from t5x_diffeq.system.allocator import keep_freed_memory
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import __version__
from t5x_diffeq.system.parent import end_with_parent

# Keys that may be None, which stands for the value in the run that init_from names.
_FROM_INIT = ("model.num_steps", "model.scheme", "model.weights")


def run(
    verb: Callable[[], int | None], doc: str, verb_flags: flags.FlagValues, several: bool = False
) -> None:
    """Parses the flags, runs the verb, and exits.

    Args:
      verb: does the work and returns the exit status; None means 0.
      doc: what `--help` prints above the flags.
      verb_flags: the verb's flags. Each verb has its own, so that one program can import two.
      several: whether this can be one of several processes.
    """
    console.prepare_outputs()
    silence_libraries()
    add_common_flags(verb_flags)
    if "--version" in sys.argv[1:]:
        _print_and_exit(f"t5x_diffeq {__version__}")
    if {"--help", "-h"} & set(sys.argv[1:]):
        _print_and_exit(f"{doc.strip()}\n\n{format_help(verb_flags)}")
    try:
        status = _work(verb, verb_flags, several)
    except BaseException as error:  # also of code that wants to end the process
        try:
            status = end_of(error)
        except (Exception, SystemExit):  # its `__str__` raises an error of its own
            status = fail(1, f"{type(error).__name__}, whose text can't be had")
    if status == 0 and (unwritten := console.results_error()):
        status = fail_to_write(unwritten)
    if others := find_peers():
        others.leave()
        if status in (1, 2, EXIT_INFRASTRUCTURE):
            os._exit(status)  # an orderly exit would wait for the others
    sys.exit(status)


def _work(verb: Callable[[], int | None], verb_flags: flags.FlagValues, several: bool) -> int:
    """Checks the environment, parses the flags and runs the verb; returns its status."""
    for variable in environment.OF_EVERY_VERB:
        variable.read()
    console.log(*environment.unknown_variables())
    end_with_parent(os.environ)
    keep_freed_memory(os.environ)
    if asked := [each for each in sys.argv[1:] if re.match("--?help=.", each)]:
        console.print_result(_help_of_keys(asked[0].partition("=")[2], verb_flags))
        return 0
    if several and _may_have_others(os.environ):
        from t5x_diffeq.cluster import processes  # importing JAX takes seconds

        processes.initialise()  # first, so that others hear which argument is invalid
    parse(sys.argv, verb_flags)
    return verb() or 0


def exit_process(status: int) -> NoReturn:
    """Exits as Python does, but without the destructors of C++ if a stream may have been read.

    Arrow's destructors wait for its threads, and a thread that reads ahead of a half-read stream
    may never end (pyarrow 26.0).
    """
    if "pyarrow.dataset" not in sys.modules:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does
    atexit._run_exitfuncs()
    with suppress(OSError):  # the reader has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    unwritten = console.results_error()
    sys.exit(fail_to_write(unwritten) if unwritten else 0)


def _may_have_others(variables: Mapping[str, str]) -> bool:
    """Whether this may be one of several processes; if not, `processes` would find no others."""
    named = (variables.get(each.name) for each in environment.OF_PROCESSES)
    return any(named) or tpu_hosts.lists_hosts(variables)


def add_common_flags(verb_flags: flags.FlagValues) -> None:
    """Defines the flags that every verb has."""
    if "quiet" not in verb_flags:
        text = "Print results, warnings and errors only."
        flags.DEFINE_bool("quiet", False, text, flag_values=verb_flags)
        text = "Run the code of other packages that the config of a run names."
        flags.DEFINE_bool("trust_plugins", False, text, flag_values=verb_flags)


def format_help(verb_flags: flags.FlagValues) -> str:
    """Each flag of the verb with its meaning and default, wrapped to the terminal's width."""
    width = max(map(len, verb_flags)) + 2
    columns = _columns()
    lines = []
    for name in verb_flags:
        flag = verb_flags[name]
        is_config = config_flags.is_config_flag(flag)
        has_default = not (is_config or flag.boolean) and flag.default not in (None, [])
        meaning = flag.help.partition(";\n")[0]  # absl adds a note that it may be repeated
        text = f"{meaning} [default: {flag.default}]" if has_default else meaning
        head = f"  --{name:<{width}}"
        indent = " " * len(head)
        lines += textwrap.wrap(text, columns, initial_indent=head, subsequent_indent=indent)
    return "\n".join(lines)


def _help_of_keys(word: str, verb_flags: flags.FlagValues) -> str:
    if "config" not in verb_flags:
        raise InputError(f"--help={word}: this verb takes no config; --help alone prints its flags")
    from t5x_diffeq.config.keys_page import help_of

    return help_of(word, _columns())


def _columns() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 100))


def parse(argv: list[str], verb_flags: flags.FlagValues) -> None:
    """Parses the verb's flags and its config, and checks their values; an InputError if invalid."""
    add_common_flags(verb_flags)
    argv = [argv[0], *map(_find_config_file, argv[1:])]
    has_config, is_branch = (
        any(re.match(f"--?{name}(=|$)", each) for each in argv)
        for name in ("config", "branch_from")
    )
    if is_branch and not has_config:
        argv.insert(1, f"--config={CONFIGS / 'default.py'}")  # a stand-in: the run's config counts
    _check_repeated(argv, verb_flags)
    mistakes.check_arguments(argv, verb_flags)
    lines: list[str] = []
    try:
        flags.FLAGS(argv[:1])  # the libraries' flags, at their defaults
        rest = verb_flags(argv)[1:]
        _check_flags(verb_flags)
        console.quiet = bool(verb_flags["quiet"].value)
        plugins.trust_all = bool(verb_flags["trust_plugins"].value)
        configs = filter(config_flags.is_config_flag, map(verb_flags.__getitem__, verb_flags))
        for config in (each.value for each in configs if each.value is not None):
            values = flatten(config)
            check_complete(values.keys())
            check_values(values, unset=_FROM_INIT)
            plugins.trust(values)
            lines += notes(values, given_keys(verb_flags))
    except flags.UnrecognizedFlagError as error:
        raise InputError(
            mistakes.explain_unknown_flag(error.flagname, verb_flags, _verbs_with)
        ) from error
    except InputError:
        raise
    except flags.Error as error:
        if isinstance(error.__context__, InputError):  # raised by the config file
            raise error.__context__ from None
        raise InputError(
            mistakes.explain_range(str(error), verb_flags)
            or mistakes.explain_parse_error(str(error))
        ) from error
    except Exception as error:  # raised by ml_collections
        line = " ".join(str(error).split()) or type(error).__name__
        raise InputError(line if line.startswith("--") else f"--config: {line}") from error
    if rest:
        raise InputError(mistakes.explain_argument(rest[0], verb_flags))
    console.log(*lines)  # last, so that an error stands alone


def _verbs_with(flag: str) -> list[str]:
    """The verbs that have a flag."""
    modules = ((verb, importlib.import_module(f"t5x_diffeq.cli.{verb}")) for verb in VERBS)
    return [verb for verb, module in modules if flag in module.FLAGS]


def _find_config_file(argument: str) -> str:
    """The argument; `configs/NAME.py` becomes the project's file if the current folder has none."""
    name = re.fullmatch(r"(--?config=)?configs/(\w+\.py)(:.*)?", argument)
    return f"{name[1] or ''}{config_file(name[2])}{name[3] or ''}" if name else argument


def _check_repeated(argv: list[str], verb_flags: flags.FlagValues) -> None:
    names = (re.match(r"--?(?:no)?(\w+)(?:=|$)", argument) for argument in argv[1:])
    for name, times in Counter(name[1] for name in names if name).items():
        if times > 1 and name in verb_flags and not isinstance(verb_flags[name], flags.MultiFlag):
            listed = isinstance(verb_flags[name].parser, WordsParser)
            once = f", with its values separated by commas: --{name}=A,B" if listed else ""
            raise InputError(f"--{name} is given {times} times; give it once{once}")


def _check_flags(verb_flags: flags.FlagValues) -> None:
    """Checks that no flag is given without a value, and that every number is finite."""
    for name in verb_flags:
        if not verb_flags[name].present or "." in name:
            continue
        value = verb_flags[name].value
        if value in ("", [], [""]):
            raise InputError(f"--{name} is empty; give it a value or leave it out")
        if (
            isinstance(value, list)
            and "" in value
            and isinstance(verb_flags[name], flags.MultiFlag)
        ):
            raise InputError(f"--{name}= is given without a value; leave that one out")
        if isinstance(value, list) and "" in value:
            raise InputError(f"--{name}={','.join(value)} has an empty entry; take it out")
        if isinstance(value, float) and not -inf < value < inf:
            raise InputError(f"--{name}={value} must be a finite number")
