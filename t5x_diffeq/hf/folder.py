"""Folders of tensors and small files, as Hugging Face lays them out, here or on its Hub."""

import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from t5x_diffeq.hf.layouts import Tensors
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.extras import install_command, need_package
from t5x_diffeq.system.files import read_json_object
from t5x_diffeq.system.foreign_files import LFS_POINTER, check_downloaded, open_inside

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 10**9
FLOATS = ("F32", "BF16", "F16")  # dtypes of stored parameters, by safetensors' names


def need_packages(verb: str) -> None:
    """Checks that the packages that read and write such folders are there (else: InputError)."""
    for package in ("safetensors", "tokenizers"):
        need_package(package, verb)


def local_path(path: object, flag: str) -> Path:
    """The path, which must be on this machine (else: InputError)."""
    if not isinstance(path, Path):
        raise InputError(f"--{flag}={path}: it must be a folder on this machine (or mounted)")
    return path


def check_new_folder(path: Path, flag: str) -> None:
    """Checks that the folder doesn't exist, or is empty (else: InputError)."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--{flag}={path} is a file; name a folder")
    if path.exists() and any(path.iterdir()):
        raise InputError(f"--{flag}={path} is not empty; empty it, or name another folder")


@contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """Yields a folder to fill beside `path`; renames it to `path` on success, else removes it.

    Raises:
      InputError: if `path` is a file or a folder that isn't empty, or a folder can't be made.
    """
    check_new_folder(path, flag)
    absolute = path.absolute()
    try:
        absolute.parent.mkdir(parents=True, exist_ok=True)
        created = tempfile.mkdtemp(
            prefix=f".{absolute.name}.", suffix=".partial", dir=absolute.parent
        )
    except OSError as error:
        raise InputError(f"--{flag}={path} can't be written: {error.strerror}") from error
    partial = Path(created)
    lock = os.open(partial, os.O_RDONLY)
    try:
        _lock(lock)  # else other processes would take this folder for an abandoned one
        _remove_abandoned(absolute)
        yield partial
        _settle(partial)
        os.replace(partial, absolute)
    except OSError as error:
        raise RunError(f"--{flag}={path} can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _lock(descriptor: int) -> bool:
    """Locks a folder until the descriptor is closed or the process ends; False if it can't."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    """Removes the partial folders that killed processes left; nobody locks these any more."""
    for partial in folder.parent.glob(f".{glob.escape(folder.name)}.????????.partial"):
        with suppress(OSError):  # a link, or somebody else's
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if _lock(descriptor):
                shutil.rmtree(partial, ignore_errors=True)
            os.close(descriptor)


def _settle(folder: Path) -> None:
    """Gives everything in the folder the permissions of a new file, and syncs it to disk."""
    umask = os.umask(0)  # the umask can only be read by setting it
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_tensors(folder: Path, tensors: Tensors, shard_bytes: int = _SHARD_BYTES) -> int:
    """Writes safetensors: one file, or several files of at most `shard_bytes` and an index.

    Returns:
      The number of parameters.

    Raises:
      RunError: if two tensors have one name.
    """
    from safetensors.numpy import save_file

    files: dict[str, str] = {}
    size, file = 0, ""
    for number, shard in enumerate(_group_shards(tensors, shard_bytes), start=1):
        file = f"model-{number:05}.safetensors"
        # The library only recognises files with this metadata as PyTorch's.
        save_file(shard, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
        size += sum(tensor.nbytes for tensor in shard.values())
    if len(set(files.values())) == 1:
        os.replace(folder / file, folder / _SINGLE)
    else:
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), "utf-8")
    return size // 4  # bytes of a float32


def _group_shards(tensors: Tensors, shard_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise RunError(f"two parameters have the name {name}; nothing is exported")
        names.add(name)
        tensor = np.ascontiguousarray(tensor, np.float32)
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


class TensorFiles:
    """The tensors of a folder, read one at a time.

    Args:
      folder: holds `model.safetensors`, or several files and their index.

    Raises:
      InputError: if there are none, or a file is missing or truncated.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.used: set[str] = set()
        self.files: dict[str, Any] = {}
        for file in map(_open_tensors, self._paths()):
            if twice := sorted(self.files.keys() & file.keys()):
                raise InputError(
                    f"--input={folder} holds {twice[0]} in two files; delete what isn't the model's"
                )
            self.files |= dict.fromkeys(file.keys(), file)

    def _paths(self) -> list[Path]:
        has_index = (self.folder / _INDEX).exists()
        if (self.folder / _SINGLE).exists():
            if has_index:
                raise InputError(
                    f"--input={self.folder} holds both {_SINGLE} and {_INDEX}, and so may hold two "
                    "models; delete what isn't the model's"
                )
            return [self.folder / _SINGLE]
        if not has_index:
            raise InputError(
                f"--input={self.folder} holds neither {_SINGLE} nor {_INDEX}; save the model there "
                "with save_pretrained(..., safe_serialization=True)"
            )
        try:
            index = read_json_object(self.folder / _INDEX)
            names = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self.folder / _INDEX} is damaged; restore it") from error
        for name in names:
            if not isinstance(name, str) or name != Path(name).name:
                raise InputError(
                    f"{self.folder / _INDEX} names {name!r:.100}, which is not the name of a file "
                    "in its folder; restore it"
                )
            if not (self.folder / name).exists():
                raise InputError(f"--input={self.folder} lacks {name}, which {_INDEX} names")
        return [self.folder / name for name in names]

    def read(self, name: str, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        """The tensor in float32.

        Raises:
          InputError: if it is missing, has another shape, a value that isn't finite, or a dtype
            other than `FLOATS`.
        """
        shorter = name.partition(".")[2]  # a base model that is saved alone has no prefix
        stored = next((each for each in (name, shorter) if each in self.files), None)
        if stored is None:
            of_peft = any(each.startswith("base_model.model.") for each in self.files)
            way_out = (
                "its names are PEFT's: merge_and_unload() makes a model of a base and adapters"
                if of_peft
                else "is it of this model?"
            )
            raise InputError(f"--input={self.folder} has no tensor {name}; {way_out}")
        tensor = self.stored(stored, FLOATS)
        if tensor.shape != shape:
            raise InputError(
                f"--input={self.folder}: {name} is of shape {tensor.shape}, and config.json makes "
                f"it {shape}"
            )
        tensor = tensor.astype(np.float32)
        if not np.isfinite(tensor).all():
            raise InputError(
                f"--input={self.folder}: {name} has values that aren't finite; restore the file, "
                "or save the model again"
            )
        self.used.add(stored)
        return tensor

    def stored(self, name: str, dtypes: tuple[str, ...]) -> Shaped[np.ndarray, "..."]:
        """The tensor of exactly this name, in its own dtype.

        Raises:
          InputError: if `dtypes`, which are safetensors' names, doesn't have its dtype.
        """
        dtype = self.files[name].get_slice(name).get_dtype()
        if dtype not in dtypes:
            raise InputError(
                f"--input={self.folder}: {name} is of dtype {dtype}, and can be of "
                f"{', '.join(dtypes)} here; save the model in bfloat16 or float32"
            )
        return self.files[name].get_tensor(name)

    def unread_names(self) -> list[str]:
        """The names of the tensors that were not read."""
        return sorted(self.files.keys() - self.used)


def _open_tensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with open_inside(path) as file:
            check_downloaded(path, file.read(len(LFS_POINTER)))
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} can't be read: {error}; restore it") from error


_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]  # to fetch


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a model's id."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, re.ASCII) is not None


def fetch_model(name: str) -> Path:
    """The folder of a model in huggingface_hub's cache, downloaded if it isn't there.

    The library shows its progress.

    Raises:
      InputError: if huggingface_hub isn't installed, or the Hub doesn't provide the model.
    """
    by_hand = f"where the Hub can be reached: hf download {name} --local-dir=DIR, then --input=DIR"
    try:
        from huggingface_hub import errors, snapshot_download  # takes a second
    except ImportError as error:
        raise InputError(
            f"--input={name}: there is no such folder; to fetch the model of that name from the "
            f"Hugging Face Hub, {install_command('data')}, or {by_hand}"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"--input={name}: there is no such folder, nor such a model on the Hugging Face Hub "
            "(if it is private or gated: hf auth login)"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"--input={name}: there is no such folder, and the Hugging Face Hub doesn't give the "
            f"model ({reason}); {by_hand}"
        ) from None
