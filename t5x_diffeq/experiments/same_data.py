"""Whether the trainings of an experiment had the same text, without which losses don't compare.

A text can change under its name: the standard library differs between versions of Python, and a
file can be edited between two runs.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.config.config_files import load_config
from t5x_diffeq.data.corpus import stored_fingerprint
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath

FINGERPRINT = "data_fingerprint"  # in outcomes
_FILE = "--config="
_NAMES_DATA = ("--config.data.", "--config.init_from=")  # the latter names the tokenizer


def check_same_data(
    arguments: Iterable[str], workdir: AnyPath, done: Mapping[str, Mapping]
) -> None:
    """Checks that a training has the data of earlier ones that name the same.

    Args:
      arguments: those of the training.
      workdir: its workdir. Before it has prepared its data, nothing is checked.
      done: earlier outcomes by the name of their run.

    Raises:
      InputError: if the same keys name other data now.
    """
    mine = stored_fingerprint(workdir)
    if mine is None:
        return
    named = _data_named(arguments)
    for name, outcome in done.items():
        theirs = outcome.get(FINGERPRINT, mine)
        if theirs != mine and _data_named(outcome.get("arguments", ())) == named:
            raise InputError(
                f"run {workdir.name}: its data (fingerprint {mine[:12]}) is not that of run {name} "
                f"({theirs[:12]}), although the same keys name it, so their losses can't be "
                f"compared; delete {workdir} and restore that data, or give another --output"
            )


def _data_named(arguments: Iterable[str]) -> set[DataKeys | str]:
    """What names the data: the `data` section of the config's file, and keys that are set."""
    given = [*arguments]
    files = (each.removeprefix(_FILE) for each in given if each.startswith(_FILE))
    return {*map(_data_of_file, files), *(each for each in given if each.startswith(_NAMES_DATA))}


@cache
def _data_of_file(file: str) -> DataKeys | str:
    try:
        return load_config(file).data
    except InputError:  # it was moved after an earlier run
        return file
