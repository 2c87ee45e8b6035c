"""Checks that the trainings of an experiment had the same text: else their losses don't compare.

A text can change under its name: the standard library differs between versions of Python, and a
file can be edited between two runs. Each outcome has a hash of its data and a hash of the keys that
named the data, so the data of an earlier run is never opened.
"""

import json
from collections.abc import Mapping

from t5x_diffeq.config.config import CONFIG_FILE
from t5x_diffeq.data.corpus import stored_fingerprint
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, digest, read_json_object
from t5x_diffeq.system.json_lines import check_types

FINGERPRINT, DATA_KEYS = "data_fingerprint", "data_keys"  # in outcomes


def data_facts(workdir: AnyPath) -> dict[str, str]:
    """For the outcome of a training: hashes of its data, and of the keys that name it.

    These keys are the `data` section and `init_from`, whose run has the tokenizer. The result is
    empty before the workdir has its config and its data.
    """
    fingerprint = stored_fingerprint(workdir)
    try:
        config = read_json_object(workdir / CONFIG_FILE)
        check_types(config, {"data": (dict,)})
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{workdir / CONFIG_FILE} is damaged: {error}; restore it") from error
    if fingerprint is None:
        return {}
    named = json.dumps([config["data"], config.get("init_from")], sort_keys=True)
    return {FINGERPRINT: fingerprint, DATA_KEYS: digest([named.encode()])}


def check_same_data(workdir: AnyPath, done: Mapping[str, Mapping]) -> None:
    """Checks that a training has the same data as the earlier trainings with the same keys.

    Args:
      workdir: the training's workdir. Before the data is prepared, nothing is checked.
      done: earlier outcomes by the name of their run.

    Raises:
      InputError: if the same keys name other data now.
    """
    facts = data_facts(workdir)
    for name, outcome in done.items():
        theirs = outcome.get(FINGERPRINT)
        same_keys = facts and outcome.get(DATA_KEYS) == facts[DATA_KEYS]
        if same_keys and theirs and theirs != facts[FINGERPRINT]:
            raise InputError(
                f"run {workdir.name}: its data (fingerprint {facts[FINGERPRINT][:12]}) is not that "
                f"of run {name} ({theirs[:12]}), although the same keys name it, so their losses "
                f"can't be compared; delete {workdir} and restore that data, or give another "
                "--output"
            )
