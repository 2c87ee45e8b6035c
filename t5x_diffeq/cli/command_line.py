"""How every verb starts and ends: flags, quiet libraries, exit statuses, a clear last line.

0    done
1    the run failed
2    the arguments, the config or the input is invalid
42   saved on preemption: run the same command again
130  stopped by Ctrl-C, saved
175  infrastructure failure (a process, link, device or bucket): run the same command again

If there are several processes, all end with the status and the last line of the first that fails
(see `_find_peers`).

Nothing here imports JAX before the flags and the config are known to be valid, and a verb's file
imports it only within functions, so that `--help` and a mistyped flag or key are answered at once.
"""

import atexit
import logging as python_logging
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NoReturn

from absl import flags, logging
from ml_collections.config_flags import config_flags

from t5x_diffeq.cluster import tpu_hosts
from t5x_diffeq.cluster.peers import (
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    LAST_LINE,
    Failure,
    Peers,
)
from t5x_diffeq.config import plugins
from t5x_diffeq.config.config import check_complete, check_values
from t5x_diffeq.config.config_files import config_file, flatten
from t5x_diffeq.config.mistakes import (
    check_arguments,
    explain_argument,
    explain_parse_error,
    explain_range,
    explain_unknown_flag,
)
from t5x_diffeq.system import console
from t5x_diffeq.system.allocator import keep_freed_memory
from t5x_diffeq.system.errors import (
    InfrastructureError,
    InputError,
    RunError,
    advice,
    is_infrastructure_failure,
    is_of_server,
    platform_error,
)
from t5x_diffeq.system.extras import __version__
from t5x_diffeq.system.files import AnyPath, describe_error, parse_path

_FROM_INIT = ("model.num_steps", "model.scheme")  # None: the values of the run that init_from names
_SECONDS_FOR_OTHERS = 3  # for other processes to say why they ended, before we blame this one


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
    keep_freed_memory(os.environ)
    try:
        if asked := [each for each in sys.argv[1:] if re.match("--?help=.", each)]:
            _print_and_exit(_help_of_keys(asked[0].partition("=")[2], verb_flags))
        if several and _may_have_others(os.environ):
            from t5x_diffeq.cluster import processes  # importing JAX takes seconds

            processes.initialise()  # first, so that others hear which argument is invalid
        parse(sys.argv, verb_flags)
        status = verb() or 0
    except (InputError, RunError) as error:
        status = _fail_foreseen(error)
    except KeyboardInterrupt:
        status = _fail(EXIT_INTERRUPTED, "stopped by Ctrl-C")
    except Exception as error:
        unwritten = console.results_error() if isinstance(error, OSError) else None
        status = _fail_to_write(unwritten) if unwritten else _fail_unforeseen(error)
    if status == 0 and (unwritten := console.results_error()):
        status = _fail_to_write(unwritten)
    if others := _find_peers():
        others.leave()
        if status in (1, 2, EXIT_INFRASTRUCTURE):
            os._exit(status)  # an orderly exit would wait for the others
    sys.exit(status)


def exit_process(status: int) -> NoReturn:
    """Exits as Python does, but without the destructors of C++ if a stream may have been read.

    Arrow's wait for its threads, and one that reads ahead of a half-read stream may never end
    (pyarrow 26.0).
    """
    if "pyarrow.dataset" not in sys.modules:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does
    atexit._run_exitfuncs()
    with suppress(OSError):  # of a reader that has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    unwritten = console.results_error()
    sys.exit(_fail_to_write(unwritten) if unwritten else 0)


def _may_have_others(environment: Mapping[str, str]) -> bool:
    """Whether this may be one of several processes; if not, `processes` finds none either."""
    named = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return any(environment.get(name) for name in named) or tpu_hosts.lists_hosts(environment)


def _find_peers() -> Peers | None:
    """The connections to the other processes, if this one has joined any."""
    processes = sys.modules.get("t5x_diffeq.cluster.processes")
    return processes.peers if processes else None


def add_common_flags(verb_flags: flags.FlagValues) -> None:
    """The flags that every verb has."""
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


def _fail(status: int, error: object) -> int:
    """Prints the last line, and tells the other processes; returns the status."""
    others = _find_peers()
    failure = Failure(others.index if others else 0, status, str(error)).unless_repeated()
    if others:
        others.send_failure(failure)
    LAST_LINE.print(failure)
    return failure.status


def _with_notes(error: Exception) -> str:
    """Its message, with our notes that say where it was raised; JAX and Grain add others."""
    notes = (each for each in getattr(error, "__notes__", ()) if each.startswith("in the hook "))
    return "; ".join([str(error), *notes])


def _fail_foreseen(error: InputError | RunError) -> int:
    """`_fail` for an error whose message this package wrote.

    If a file can't be read or written because its bucket or network disk does not answer, the
    problem may be temporary, and the status is that of a `InfrastructureError`.
    """
    if error.__cause__ is not None and is_infrastructure_failure(error.__cause__):
        return _fail(EXIT_INFRASTRUCTURE, _with_notes(error))
    return _fail(2 if isinstance(error, InputError) else 1, _with_notes(error))


def _fail_to_write(error: OSError) -> int:
    """`_fail` for results that standard output doesn't take.

    If their reader has ended, as in `generate | head -1`, nobody wants the rest.
    """
    if isinstance(error, BrokenPipeError):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    return _fail(1, f"standard output can't be written: {describe_error(error)}")


def _fail_unforeseen(error: Exception) -> int:
    if _find_peers():
        time.sleep(_SECONDS_FOR_OTHERS)  # another may have failed first, and will end this one
    if isinstance(error, InfrastructureError):
        return _fail(EXIT_INFRASTRUCTURE, error)
    if is_infrastructure_failure(error):
        who = "a bucket or another server does not answer: " if is_of_server(error) else ""
        message = f"{who}{describe_error(error)}{advice(error)}"
        return _fail(EXIT_INFRASTRUCTURE, f"{message}; the same command continues the run")
    if refused := platform_error(error):
        return _fail(2, refused)
    with suppress(OSError):
        traceback.print_exception(error)
    if others := _find_peers():
        others.wait_for_all()  # one may be lost, which takes longer to notice than its consequences
    return _fail(1, f"{type(error).__name__}: {_with_notes(error)}")


_CACHE_FAILED = "Error (reading|writing) persistent compilation cache"
_cache_failures: set[str] = set()


def silence_libraries() -> None:
    """Silences the libraries, so that a run shows only our lines; Python's -W shows warnings."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.FATAL)  # Orbax's errors reach us as exceptions
    python_logging.getLogger("jax").setLevel(python_logging.ERROR)
    for library in ("asyncio", "gcsfs", "google"):
        python_logging.getLogger(library).setLevel(python_logging.CRITICAL)
    sys.unraisablehook = _show_unless_loop_closed
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        # JAX goes on without its cache, and then each start compiles everything again.
        warnings.filterwarnings("always", message=_CACHE_FAILED)
        warnings.showwarning = _log_first_failure


def _show_unless_loop_closed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Shows an error that nothing can catch, but for those of TensorStore's threads.

    When a save has failed, they tell an event loop that Orbax has closed of each file left.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _log_first_failure(message: Warning | str, *_: object, **__: object) -> None:
    """Prints JAX's first warning about reading, and the first about writing, in one line."""
    failure = re.match(_CACHE_FAILED, str(message))
    if failure and failure[0] not in _cache_failures:
        _cache_failures.add(failure[0])
        console.log(f"warning: {' '.join(str(message).split())}")


def parse(argv: list[str], verb_flags: flags.FlagValues) -> None:
    """Parses the verb's flags, and the config's if it has one."""
    add_common_flags(verb_flags)
    argv = [argv[0], *map(_find_config_file, argv[1:])]
    has_config, is_branch = (
        any(re.match(f"--?{name}(=|$)", each) for each in argv)
        for name in ("config", "branch_from")
    )
    if is_branch and not has_config:
        argv.insert(1, f"--config={config_file('default.py')}")  # the config is that of the run
    _check_repeated(argv, verb_flags)
    check_arguments(argv, verb_flags)
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
    except flags.UnrecognizedFlagError as error:
        raise InputError(explain_unknown_flag(error.flagname, verb_flags)) from error
    except InputError:
        raise
    except flags.Error as error:
        if isinstance(error.__context__, InputError):  # of the config file
            raise error.__context__ from None
        raise InputError(
            explain_range(str(error), verb_flags) or explain_parse_error(str(error))
        ) from error
    except Exception as error:  # of ml_collections
        line = " ".join(str(error).split()) or type(error).__name__
        raise InputError(line if line.startswith("--config") else f"--config: {line}") from error
    if rest:
        raise InputError(explain_argument(rest[0], verb_flags))


def _find_config_file(argument: str) -> str:
    """The path, with `configs/NAME.py` resolved to the project's file if none is here."""
    name = re.fullmatch(r"(--?config=)?configs/(\w+\.py)(:.*)?", argument)
    return f"{name[1] or ''}{config_file(name[2])}{name[3] or ''}" if name else argument


def given_keys(verb_flags: flags.FlagValues) -> set[str]:
    """The keys of the config that the command line sets."""
    named = {name for name in verb_flags if name.startswith("config.") and verb_flags[name].present}
    return {name.removeprefix("config.") for name in named}


def parse_folder(flag: flags.FlagHolder | flags.Flag, verb: str) -> AnyPath:
    """The folder that a flag names, on this machine or in a bucket.

    Raises:
      InputError: if the flag isn't given, or the folder can't be reached.
    """
    if not flag.value:
        raise InputError(f"{verb} needs --{flag.name}=DIR; see --help")
    return _parse_folder(flag.value, flag.name)


def parse_folders(flag: flags.FlagHolder, verb: str) -> list[AnyPath]:
    """The folders that a repeated flag names; raises what `parse_folder` does."""
    if not flag.value:
        raise InputError(f"{verb} needs --{flag.name}=DIR; see --help")
    return [_parse_folder(text, flag.name) for text in flag.value]


def _parse_folder(text: str, name: str) -> AnyPath:
    path = parse_path(text, f"--{name}")
    if isinstance(path, Path):
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            raise InputError(f"--{name}={path} is a link to {target}, which doesn't exist")
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise InputError(f"--{name}={path}: {there} is a file; name a folder")
    return path


def check_plot(flag: flags.FlagHolder) -> None:
    """Checks the file that `--plot` names, if it is given: its suffix, and that it is no folder."""
    if flag.value and not flag.value.endswith((".png", ".pdf", ".svg")):
        raise InputError(f"--plot={flag.value} must end in .png, .pdf or .svg")
    if flag.value and parse_path(flag.value, "--plot").is_dir():
        raise InputError(f"--plot={flag.value} is a folder; name a file")


def parse_part(flag: flags.FlagHolder | flags.Flag) -> tuple[int, int]:
    """(i, n) of a flag's `i/n`, the i-th of n parts; without a value, the whole.

    Raises:
      InputError: if it is not that, with 0 <= i < n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", flag.value or "0/1", re.ASCII)
    if not match or not int(match[1]) < int(match[2]):
        raise InputError(
            f"--{flag.name}={flag.value} is not i/n with i from 0 to n - 1, such as 3/64"
        )
    return int(match[1]), int(match[2])


def _check_repeated(argv: list[str], verb_flags: flags.FlagValues) -> None:
    names = (re.match(r"--?(?:no)?(\w+)(?:=|$)", argument) for argument in argv[1:])
    for name, times in Counter(name[1] for name in names if name).items():
        if times > 1 and name in verb_flags and not isinstance(verb_flags[name], flags.MultiFlag):
            raise InputError(f"--{name} is given {times} times; give it once")


def _check_flags(verb_flags: flags.FlagValues) -> None:
    """Checks that no flag is given without a value, and that every number is finite."""
    for name in verb_flags:
        if not verb_flags[name].present or "." in name:
            continue
        value = verb_flags[name].value
        if value in ("", []) or (isinstance(value, list) and "" in value):
            raise InputError(f"--{name} is empty; give it a value or leave it out")
        if isinstance(value, float) and not -inf < value < inf:
            raise InputError(f"--{name}={value} must be a finite number")
