"""The folder `checkpoints/` of a workdir: which checkpoints in it are complete.

Orbax renames a folder on this machine to its step when all is written; in a bucket it writes
`commit_success.txt` last. What lacks that is an interrupted save, which Orbax deletes.
"""

import uuid

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, absolute_path, is_in_bucket, write_whole

MARKER = "commit_success.txt"
_RUN_ID = "run_id"  # a file in the workdir


def check_path(workdir: AnyPath) -> None:
    """Checks that Orbax can find a checkpoint's parts in a workdir, which it does by a glob.

    Raises:
      InputError: if its path has characters with a meaning in a glob.
    """
    path = str(absolute_path(workdir))
    if special := next((each for each in "[*?" if each in path), None):
        raise InputError(
            f"workdir {path} has {special} in its path, and Orbax would not find the parts of its "
            "checkpoints; choose a --workdir without [, * and ?"
        )


def whole_steps(folder: AnyPath) -> list[int]:
    """The steps of the complete checkpoints in `folder`, oldest first."""
    return sorted(
        int(step.name)
        for step in steps_in(folder)
        if not is_in_bucket(step) or (step / MARKER).exists()
    )


def steps_in(folder: AnyPath) -> list[AnyPath]:
    """The folders named after a step."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]


def identify_run(workdir: AnyPath) -> str:
    """What tells the run in a workdir from any other, also from an earlier one in that folder.

    If it isn't recorded yet, it is made; only one process may do that.
    """
    path = workdir / _RUN_ID
    if not path.exists():
        write_whole(path, uuid.uuid4().hex.encode())
    return path.read_text()
