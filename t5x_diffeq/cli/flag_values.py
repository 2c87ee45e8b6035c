"""What the values of flags mean: folders, a plot's file, a part of several, keys of the config."""

import re
from pathlib import Path

from absl import flags

from t5x_diffeq.config.config import is_run
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import BUCKETS, AnyPath, parse_path


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


def parse_output_of_runs(flag: flags.FlagHolder | flags.Flag, verb: str) -> Path:
    """The folder for a set of runs, whose logs and results are appended to: not in a bucket.

    Raises:
      InputError: as `parse_folder` does, and if the folder is in a bucket.
    """
    if (flag.value or "").startswith(BUCKETS):  # before anybody looks into the bucket
        raise InputError(
            f"--{flag.name}={flag.value} is in a bucket; name a folder that all machines see"
        )
    folder = Path(parse_folder(flag, verb))
    if is_run(folder):
        raise InputError(f"--{flag.name}={folder} is the workdir of a run; name another folder")
    return folder


def parse_folders(flag: flags.FlagHolder, verb: str) -> list[AnyPath]:
    """The folders that a repeated flag names; raises what `parse_folder` does."""
    if not flag.value:
        raise InputError(f"{verb} needs --{flag.name}=DIR; see --help")
    return [_parse_folder(text, flag.name) for text in flag.value]


def _parse_folder(text: str, name: str) -> AnyPath:
    path = parse_path(text, f"--{name}")
    if isinstance(path, Path):
        if not path.exists() and (meant := _not_a_folder(text)):
            raise InputError(f"--{name}={text!r} {meant}")
        if path == path.parent:
            raise InputError(f"--{name}={text} is the root of all folders; name one in it")
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            raise InputError(f"--{name}={path} is a link to {target}, which doesn't exist")
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not existing.is_dir():
            raise InputError(f"--{name}={path}: {existing} is a file; name a folder")
    return path


def _not_a_folder(text: str) -> str | None:
    """Why no new folder has this name: what it means to a shell, to ssh or to Windows."""
    if text != text.strip():
        return "begins or ends with a space; leave that out"
    if variable := re.match(r"\$\{?\w+", text):
        return f"has {variable[0]}, which the shell has not filled in; put it in double quotes"
    if re.match(r"[A-Za-z]:\\", text):
        return "is a path of Windows; give one of this machine, such as /mnt/c/runs under WSL"
    if re.match(r"[\w.-]+@[\w.-]+:", text):
        return "is on another machine; mount it here, or run this command there"
    return None


def check_new_run(workdir: AnyPath) -> None:
    """An InputError if the workdir of a training is a part of a run, such as its checkpoints."""
    if workdir.name in ("checkpoints", "data") and is_run(workdir.parent):
        raise InputError(
            f"workdir {workdir} is a part of the run {workdir.parent}; name that workdir, or "
            "another folder"
        )


def check_plot(flag: flags.FlagHolder) -> None:
    """Checks the file that `--plot` names, if it is given: its suffix, and that it is no folder."""
    if flag.value and not flag.value.endswith((".png", ".pdf", ".svg")):
        raise InputError(f"--plot={flag.value} must end in .png, .pdf or .svg")
    if flag.value and parse_path(flag.value, "--plot").is_dir():
        raise InputError(f"--plot={flag.value} is a folder; name a file")


def parse_part(flag: flags.FlagHolder | flags.Flag) -> tuple[int, int]:
    """(i, n) of a flag's `i/n`, the i-th of n parts; without a value, the whole.

    Raises:
      InputError: if the value is not `i/n` with 0 <= i < n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", flag.value or "0/1", re.ASCII)
    if not match or not int(match[1]) < int(match[2]):
        raise InputError(
            f"--{flag.name}={flag.value} is not i/n with i from 0 to n - 1, such as 3/64"
        )
    return int(match[1]), int(match[2])
