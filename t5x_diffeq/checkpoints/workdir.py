"""The workdir of a run: its config, and whether another command may continue the run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import jax
from flax.traverse_util import flatten_dict

from t5x_diffeq.checkpoints.checkpoint_folder import check_path, steps_in
from t5x_diffeq.checkpoints.identity import RUN_ID
from t5x_diffeq.cluster import recurrence
from t5x_diffeq.cluster.processes import gather
from t5x_diffeq.config.config import CONFIG_FILE, KEYS, SECTIONS, Config, is_run
from t5x_diffeq.config.plugins import changed_plugins, check_trusted, plugin_versions, trust
from t5x_diffeq.data.corpus import explain_no_run, is_hugging_face
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import __version__
from t5x_diffeq.system.files import (
    AnyPath,
    describe_error,
    digest,
    read_json_object,
    write_whole,
)
from t5x_diffeq.system.locks import hold_lock

_VERSION = "t5x_diffeq"  # the key for the version that wrote the config
_DIGEST = "digest"  # the key for a hash of all values of the config
_PLUGINS = "plugins"  # the key for what identifies the packages that the config names
# Keys of earlier versions, which runs don't need any more.
_FORMER_KEYS = (
    *("train.local_checkpoints", "train.local_checkpoint_every"),
    *("tasks.names", "tasks.every", "tasks.num_fewshot", "tasks.limit", "tasks.include_path"),
)
_logged: set[tuple[AnyPath, str]] = set()  # the notes that this process has printed


def short_names(workdirs: Sequence[AnyPath]) -> list[str]:
    """The names of workdirs, or their whole paths where two have the same name."""
    names = [workdir.name or str(workdir) for workdir in workdirs]
    return names if len({*names}) == len(names) else [str(workdir) for workdir in workdirs]


def check_config(config: Config, workdir: AnyPath) -> bool:
    """Whether the workdir is new; if not, checks that `config` may continue the run in it.

    The keys that may differ (`Key.resume`) decide neither which parameters the model has nor in
    which order it sees the data. The learning rate follows the new schedule.

    Raises:
      InputError: if the workdir belongs to another config, or has lost its config.
    """
    check_path(workdir)
    trust(config.flat())
    if not is_run(workdir):
        if steps_in(workdir / "checkpoints"):
            raise InputError(
                f"workdir {workdir} holds checkpoints but no {CONFIG_FILE}, so their config "
                "is unknown; restore that file or choose a new --workdir"
            )
        return True
    stored = stored_config(workdir)
    differing = [
        f"{key} was {old!r}, is {new!r}"
        for key, (old, new) in differing_keys(stored, config).items()
        if not KEYS[key].resume
    ]
    if differing:
        raise InputError(
            f"workdir {workdir} belongs to another config: {'; '.join(differing)}; "
            "restore these or choose a new --workdir"
        )
    # The only key that may differ and yet names code that `evaluate` runs: when the training has
    # ended, launch/local.sh trusts the workdir.
    check_trusted({"data.mixture": stored.data.mixture}, workdir / CONFIG_FILE)
    return False


def save_config(config: Config, workdir: AnyPath, run_id: str) -> None:
    """Writes `config.json`, which binds the workdir to config and run; only process 0 writes.

    `train` calls it after the first optimizer step. A run that fails before has saved nothing, so
    its workdir can be used with another config.
    """
    if jax.process_index() != 0:
        return
    plugins = plugin_versions(config.flat())
    recorded = {_PLUGINS: plugins} if plugins else {}
    values = config.as_json()
    facts = {_VERSION: __version__, RUN_ID: run_id, _DIGEST: _digest_of(values), **recorded}
    content = {**facts, **values}
    write_whole(workdir / CONFIG_FILE, json.dumps(content, indent=2).encode())


def _digest_of(values: Mapping[str, object]) -> str:
    return digest([json.dumps(values, sort_keys=True).encode()])


def differing_keys(before: Config, now: Config) -> dict[str, tuple]:
    """Both values of each dotted key in which two configs differ."""
    old, new = flatten_dict(before.as_json(), sep="."), flatten_dict(now.as_json(), sep=".")
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in keys}


def read_config(workdir: AnyPath, trust_plugins: bool = False, named: str = "") -> Config:
    """The config in a workdir's `config.json`; keys added since it was written get defaults.

    If it names code of other packages that no person has named or trusted, this is an `InputError`,
    unless `trust_plugins` says that the code may be run. `named` is what messages put before the
    workdir, such as "config.init_from=".
    """
    config = stored_config(workdir, named)
    trust(config.flat()) if trust_plugins else check_trusted(config.flat(), workdir / CONFIG_FILE)
    return config


def stored_config(workdir: AnyPath, named: str = "") -> Config:
    """`read_config` for a config that is only looked at: nothing that it names is loaded.

    Raises:
      InputError: if the workdir has no config, or one that this version can't read.
    """
    path = workdir / CONFIG_FILE
    try:
        config = read_json_object(path)
        if missing := sorted(SECTIONS.keys() - config.keys()):
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{named}{explain_no_run(workdir)}") from error
    except PermissionError:
        raise  # with its path
    except (ValueError, OSError) as error:
        if is_hugging_face(workdir):
            raise InputError(f"{named}{explain_no_run(workdir)}") from error
        raise InputError(
            f"{path} is not the config of a run: {describe_error(error)}; restore it or choose a "
            "new --workdir"
        ) from error
    version, recorded = config.pop(_VERSION, "0.1.0 or earlier"), config.pop(_PLUGINS, {})
    config.pop(RUN_ID, None)
    written = config.pop(_DIGEST, None)  # None: by an earlier version
    if written not in (None, _digest_of(config)):
        what = "it is used as it is now, also for checkpoints of before"
        _log_once(workdir, f"warning: {path} was changed after the run wrote it; {what}")
    try:
        stored = Config().with_values(_usable_values(config))
    except InputError as error:
        raise InputError(
            f"{path}, written by t5x_diffeq {version}, can't be used by {__version__}: {error}"
        ) from error
    for change in changed_plugins(stored.flat(), recorded if isinstance(recorded, dict) else {}):
        _log_once(workdir, f"note: {change}")
    return stored


def _log_once(workdir: AnyPath, line: str) -> None:
    if (workdir, line) not in _logged:
        _logged.add((workdir, line))
        log(line)


def _usable_values(config: dict) -> dict[str, object]:
    """The values by dotted key, without those of former keys."""
    for section in SECTIONS:
        if not isinstance(config[section], dict):
            raise InputError(f"{section} is {config[section]!r}; it must be a JSON object of keys")
    values = flatten_dict(config, sep=".")
    values = {key: value for key, value in values.items() if key not in _FORMER_KEYS}
    for key in values:
        if key not in KEYS:
            raise InputError(f"its key {key} does not exist here; use the version that wrote it")
    return values


@contextmanager
def sole_writer(workdir: AnyPath) -> Iterator[None]:
    """A context in which no other run writes to the workdir; `InputError` if one does."""
    with ExitStack() as stack:
        recurrence.begin(workdir)
        if jax.process_index() == 0:  # JAX looks for its devices
            stack.enter_context(hold_lock(workdir / ".lock", f"--workdir={workdir}"))
        yield


@contextmanager
def comparing_failures(workdir: AnyPath, start: int) -> Iterator[None]:
    """A context whose failure is compared with the last attempt's failure (see `recurrence`)."""
    before = recurrence.take_last_failure(workdir) if jax.process_index() == 0 else {}
    recurrence.watch(workdir, start, gather("the last failure", before)[0])
    yield
    recurrence.end()
