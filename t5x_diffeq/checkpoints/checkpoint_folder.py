"""The folder `checkpoints/` of a workdir: which checkpoints in it are complete.

Orbax renames a folder on this machine to its step when all is written; in a bucket it writes
`commit_success.txt` last, and deletes a folder that lacks it as an interrupted save.
"""

import uuid
from pathlib import Path

import tensorstore

from t5x_diffeq.system.console import say
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import (
    BUCKETS,
    AnyPath,
    absolute_path,
    is_in_bucket,
    move_folder,
    parse_json,
    write_whole,
)

ASIDE = "unreadable_checkpoints"  # a folder of the workdir, beside `checkpoints/`
MARKER = "commit_success.txt"
METADATA = "_CHECKPOINT_METADATA"
_RUN_ID = "run_id"  # a file in the workdir


def check_path(workdir: AnyPath) -> None:
    """Checks that Orbax can make checkpoints in a workdir, and find their parts there by a glob."""
    folder = workdir / "checkpoints"
    if isinstance(folder, Path) and folder.is_symlink() and not folder.is_dir():
        raise InputError(
            f"{folder} is a link to {folder.readlink()}, which is no folder; remove the link"
        )
    path = str(absolute_path(workdir))
    if special := next((each for each in "[*?" if each in path), None):
        raise InputError(
            f"workdir {path} has {special} in its path, and Orbax would not find the parts of its "
            "checkpoints; choose a --workdir without [, * and ?"
        )


def mark_copies(folder: AnyPath) -> None:
    """Marks checkpoints in a bucket that were copied without their marker; Orbax would delete them.

    Orbax's own metadata say whether it has written all of a checkpoint. What lacks both is moved to
    `unreadable_checkpoints/`. Only one process may call this.
    """
    for step in steps_in(folder) if is_in_bucket(folder) else ():
        if (step / MARKER).exists():
            continue
        if not (step / METADATA).exists():
            move_folder(step, folder.parent / ASIDE / step.name)
            say(f"warning: checkpoint {step.name} lacks {MARKER} and {METADATA}; moved to {ASIDE}")
        elif parse_json((step / METADATA).read_bytes()).get("commit_timestamp_nsecs"):
            write_whole(step / MARKER, b"")
            say(f"checkpoint {step.name} is complete but lacks {MARKER}: marked again")


def count_arrays(checkpoint: AnyPath) -> int:
    """How many arrays can be found in a saved train state."""
    base: dict[str, str] = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    if is_in_bucket(checkpoint):
        bucket, _, path = str(checkpoint).removeprefix(BUCKETS).partition("/")
        base = {"driver": "gcs", "bucket": bucket, "path": f"{path}/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return sum(key.endswith(b".zarray") for key in store.list().result())


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
    """The id of the run in a workdir, made if there is none; only one process may call this."""
    path = workdir / _RUN_ID
    if not path.exists():
        write_whole(path, uuid.uuid4().hex.encode())
    return path.read_text("utf-8")
