"""Which folders in `checkpoints/` are complete checkpoints, and what happens to the others.

Orbax writes `commit_success.txt` last. On this machine it also renames the folder last, so that a
folder named after a step is complete even without that file; it may be from before Orbax 0.12.3, or
copied without it. In a bucket Orbax relies on the file alone, and would delete a folder that lacks
it: here only an interrupted save is deleted.
"""

import json
import shutil
import uuid

import tensorstore

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import (
    BUCKETS,
    AnyPath,
    absolute_path,
    bucket_files,
    is_in_bucket,
    move_folder,
    write_whole,
)

MARKER = "commit_success.txt"
METADATA = "_CHECKPOINT_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"
ASIDE = "unreadable_checkpoints"
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


def count_arrays(checkpoint: AnyPath) -> int:
    """How many arrays can be found in a saved train state."""
    base: dict[str, str] = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    if is_in_bucket(checkpoint):
        bucket, _, path = str(checkpoint).removeprefix(BUCKETS).partition("/")
        base = {"driver": "gcs", "bucket": bucket, "path": f"{path}/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return sum(key.endswith(b".zarray") for key in store.list().result())


def whole_steps(folder: AnyPath) -> list[int]:
    """The steps of the complete checkpoints in `folder`, oldest first; nothing is changed."""
    return sorted(int(step.name) for step in steps_in(folder) if _is_whole(step))


def steps_in(folder: AnyPath) -> list[AnyPath]:
    """The folders named after a step."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]


def _is_whole(step: AnyPath) -> bool:
    """Whether a checkpoint was written completely, as far as its files show."""
    if not is_in_bucket(step):
        return (step / "state").is_dir()
    return (step / MARKER).exists() or _was_committed(step) is True


def _was_committed(step: AnyPath) -> bool | None:
    """Whether Orbax began to commit it, after writing all of it; None if that is unknown."""
    try:
        metadata = json.loads((step / METADATA).read_text())
        return metadata["commit_timestamp_nsecs"] is not None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None


def tidy_checkpoints(folder: AnyPath) -> None:
    """Deletes interrupted saves, and adds the marker file to complete checkpoints that lack it.

    Only one process may call it. Folders of unknown state are moved to `unreadable_checkpoints/`.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _UNFINISHED in path.name:
            _remove(path)
    for step in steps_in(folder):
        if (step / MARKER).exists():
            continue
        if _is_whole(step):
            say(f"checkpoint {step.name} lacks {MARKER}, and is whole: marked anew")
            (step / MARKER).write_text(f"Checkpoint commit was successful to {step}")
        elif _was_committed(step) is False:
            _remove(step)
        else:
            aside = set_aside(step)
            say(f"warning: checkpoint {step.name} lacks {MARKER} and {METADATA}; moved to {aside}")


def identify_run(workdir: AnyPath) -> str:
    """What tells the run in a workdir from any other, also from an earlier one in that folder.

    If it isn't recorded yet, it is made; only one process may do that.
    """
    path = workdir / _RUN_ID
    if not path.exists():
        write_whole(path, uuid.uuid4().hex.encode())
    return path.read_text()


def set_aside(step: AnyPath) -> AnyPath:
    """Moves a checkpoint to another folder, deleting nothing; returns its new path."""
    aside = step.parent.parent / ASIDE / step.name
    move_folder(step, aside)
    return aside


def _remove(path: AnyPath) -> None:
    if is_in_bucket(path):
        bucket_files().rm(str(path), recursive=True)
    else:
        shutil.rmtree(path)
