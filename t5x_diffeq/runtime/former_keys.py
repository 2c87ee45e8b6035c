"""Keys and values that configs once had, for command lines and workdirs from before they went."""

import re
from collections.abc import Mapping

from t5x_diffeq.runtime.errors import InputError

# The new name of each renamed key.
_RENAMED = {
    "model.rotary_base": "model.rope_theta",
    "model.rotary_scaling": "model.rope_scaling",
    "optimizer.min_lr_ratio": "optimizer.end_lr_fraction",
}
# By key: the old and the new names of its values.
_RENAMED_VALUES = {"model.time_embedding": {"per_layer": "separate", "shared": "common"}}
# By key: the value that left it unused; a run with that value continues as before.
_REMOVED: dict[str, object] = {
    "data.tokenize": "ahead",
    "mesh.expert": 1,
    "mesh.stage": 1,
    "model.pipeline_microbatches": None,
    "model.quantization": "none",
    "model.reversibility": 0.99,
    "model.time_table": "normal",
    "optimizer.cooldown_shape": "linear",
    "optimizer.moment_dtype": "float32",
    "optimizer.offload": False,
    "train.depths_rule": "random",
    "train.growth": "jump",
    "train.jitter": 0.0,
    "train.memory_profile": False,
}
# Keys that change what a trained model computes.
_OF_MODEL = ("model.block", "model.scheme", "model.time_basis")
# Keys that are still there, and a pattern of the texts that they no longer take.
_REMOVED_VALUES: dict[str, str] = {
    "model.block": r"t5x_diffeq\.blocks\.(gated_linear_attention|mixture_of_experts):.*",
    "model.remat": r"every:\d+",
    "model.scheme": "leapfrog|reversible:(euler|lie_trotter|strang|midpoint|heun|rk4)",
    "model.time_basis": r"(chebyshev|splines):\d+",
    "optimizer.moments": "factored|int4|mean_bfloat16",
    "train.trackers": r".*\btrackio\b.*",
}
# Of all of these, the keys that do not change what a run computes.
_BESIDE_THE_RUN = (
    "mesh.expert",
    "mesh.stage",
    "model.pipeline_microbatches",
    "optimizer.offload",
    "train.trackers",
)
_LAST = "dcf23fb"  # the last commit that had them, unless it stands here
# By key, or by the module of a block.
_LAST_OF = {
    **dict.fromkeys(
        ("model.block", "model.reversibility", "model.scheme", "train.trackers"), "14a4da5"
    ),
    **dict.fromkeys(
        (
            "mesh.expert",
            "mesh.stage",
            "model.pipeline_microbatches",
            "optimizer.offload",
            "t5x_diffeq.blocks.mixture_of_experts",
        ),
        "d3df509",
    ),
}


def former_key_error(key: str) -> str | None:
    """The message for a key that configs no longer have; None for any other."""
    if key in _RENAMED:
        return f"config key {key!r} is called {_RENAMED[key]!r} now"
    if key in _REMOVED:
        return f"config key {key!r} was removed; {_last_commit(key)}"
    return None


def former_name_error(said: str) -> str | None:
    """The message instead of a ConfigDict's, when a config file sets a removed key.

    Args:
      said: the ConfigDict's error, which has the name of the key without its section.

    Returns:
      None if it isn't a former key.
    """
    name = re.search(r'Key "(\w+)" does not exist', said)
    keys = (key for key in (*_RENAMED, *_REMOVED) if name and key.endswith(f".{name[1]}"))
    return next(map(former_key_error, keys), None)


def former_value_error(key: str, value: object) -> str | None:
    """The message for a value that a key no longer takes; None for any other."""
    if new := _RENAMED_VALUES.get(key, {}).get(str(value)):
        return f"{key}={value} is called {new} now"
    if re.fullmatch(_REMOVED_VALUES.get(key, "(?!)"), str(value)):
        return f"{key}={value!r} was removed; {_last_commit(key, value)}"
    return None


def without_former_keys(values: Mapping[str, object], to_train: bool) -> dict[str, object]:
    """The values of an old config, by the keys of today.

    Args:
      values: what a `config.json` holds, by dotted key.
      to_train: whether the run is to go on. If it is only to be loaded, what concerned its training
        gets today's defaults.

    Raises:
      InputError: if the run needs a key or a value that was removed; names the last commit that had
        it.
    """
    values = {_RENAMED.get(key, key): value for key, value in values.items()}
    for key, names in _RENAMED_VALUES.items():
        if key in values:
            values[key] = names.get(str(values[key]), values[key])
    removed = {
        key
        for key, value in values.items()
        if (key in _REMOVED and value not in (None, _REMOVED[key]))
        or re.fullmatch(_REMOVED_VALUES.get(key, "(?!)"), str(value))
    }
    for key in sorted(removed):
        if key in _OF_MODEL or (to_train and key not in _BESIDE_THE_RUN):
            raise InputError(f"{key}={values[key]!r} was removed; {_last_commit(key, values[key])}")
    return {key: x for key, x in values.items() if key not in removed and key not in _REMOVED}


def _last_commit(key: str, value: object = None) -> str:
    module, _, _ = str(value).partition(":")
    commit = _LAST_OF.get(module) or _LAST_OF.get(key, _LAST)
    return f"commit {commit} was the last that had it"
