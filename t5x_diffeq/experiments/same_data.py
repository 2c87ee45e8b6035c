"""Whether the trainings of an experiment had the same text, without which losses don't compare.

A text can change under its name: the standard library differs between versions of Python, and a
file can be edited between two runs.
"""

from collections.abc import Iterable, Mapping

from t5x_diffeq.data.corpus import stored_fingerprint
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath

FINGERPRINT = "data_fingerprint"  # in outcomes


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
    mine, named = stored_fingerprint(workdir), _data_named(arguments)
    if mine is None:
        return
    for name, outcome in done.items():
        theirs = outcome.get(FINGERPRINT, mine)
        if theirs != mine and _data_named(outcome["arguments"]) == named:
            raise InputError(
                f"run {workdir.name}: its data (fingerprint {mine[:12]}) is not that of run {name} "
                f"({theirs[:12]}), although the same keys name it, so their losses can't be "
                f"compared; delete {workdir} and restore that data, or give another --output"
            )


def _data_named(arguments: Iterable[str]) -> set[str]:
    """The arguments that name the data: the config's file, and the keys of `data`."""
    return {
        argument.partition(":")[0] if argument.startswith("--config=") else argument
        for argument in arguments
        if argument.startswith(("--config=", "--config.data.", "--init_from="))
    }
