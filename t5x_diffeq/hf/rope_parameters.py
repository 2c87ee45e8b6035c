"""Rotary positions in a `config.json`, to and from `model.rope_theta` and `rope_scaling`.

Version 5 of transformers keeps everything in `rope_parameters`; version 4 has `rope_theta` and
`rope_scaling`, whose key for the type was once `type`.
"""

from collections.abc import Mapping
from math import log
from typing import Any

from t5x_diffeq.hf.refusals import way_out
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.rotary import BASE, Scaling
from t5x_diffeq.system.errors import InputError

_LENGTH = "original_max_position_embeddings"
# The library's names of a scaling's numbers, in the order of `rope_scaling`.
_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", "beta_fast", "beta_slow", _LENGTH, "attention_factor"),
}


def rotary_to_json(config: ModelConfig) -> dict:
    """The keys of `config.json`, for versions 4 and 5 of the library."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling:
        kind, *numbers = config.rope_scaling
        scaling = {"rope_type": kind, **dict(zip(_NUMBERS[str(kind)], numbers, strict=True))}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling else None,
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
    }


def rotary_from_json(config_json: Mapping[str, Any], length: int) -> dict:
    """`rope_theta` and `rope_scaling` of a folder.

    Raises:
      InputError: if rotary positions of this kind are not supported.
    """
    rope = _parameters(config_json)
    kind = rope.get("rope_type", "default")
    if kind != "default" and kind not in _NUMBERS:
        raise InputError(
            f"--input: rotary positions are scaled by {kind!r} in config.json; the scalings that "
            f"can be converted are {', '.join(_NUMBERS)}{way_out('rope_scaling')}"
        )
    for key, only in (("partial_rotary_factor", 1.0), ("truncate", True), ("mscale", None)):
        value = rope.get(key, config_json.get(key))
        if value not in (None, only):
            raise InputError(
                f"--input: {key} is {value!r} in config.json, and only rotary positions with "
                f"{only} can be converted{way_out(key)}"
            )
    base = rope.get("rope_theta", config_json.get("rope_theta"))
    scaling = () if kind == "default" else (kind, *_numbers(kind, rope, length))
    return {
        "rope_theta": _number("rope_theta", BASE if base is None else base),
        "rope_scaling": scaling,
    }


def _parameters(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters, which version 4 and version 5 of the library keep under different keys."""
    given = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config_json.get(key) or {}
        if not isinstance(rope, Mapping) or any(isinstance(x, Mapping) for x in rope.values()):
            raise InputError(
                f"--input: {key} is {rope!r} in config.json; it must be one set of parameters"
            )
        if rope:
            given[key] = {("rope_type" if k == "type" else k): x for k, x in rope.items()}
    scaling, parameters = given.get("rope_scaling", {}), given.get("rope_parameters", {})
    elsewhere = {"rope_theta": config_json.get("rope_theta"), **scaling}
    for name, value in parameters.items():
        other = elsewhere.get(name)
        if other is not None and other != value:
            raise InputError(
                f"--input: {name} is {value!r} in rope_parameters of config.json, and {other!r} "
                "elsewhere in it; make them agree"
            )
    return {**parameters, **scaling}


def _numbers(kind: str, given: Mapping[str, Any], length: int) -> Scaling:
    """The numbers of a scaling; numbers that are missing have the library's defaults, if any."""
    values: dict[str, Any] = {_LENGTH: length}
    values |= {name: value for name, value in given.items() if value is not None}
    if kind == "yarn":
        values.setdefault("factor", length / _number(_LENGTH, values[_LENGTH]))
        values = {"beta_fast": 32, "beta_slow": 1} | values
        # The default of yarn's factor on cosines and sines: 1 + 0.1 log(factor).
        factor = _number("factor", values["factor"])
        values.setdefault("attention_factor", 0.1 * log(max(1.0, factor)) + 1)
    missing = [name for name in _NUMBERS[kind] if name not in values]
    if missing:
        raise InputError(
            f"--input: config.json lacks {missing[0]} of its {kind} rotary positions; restore it"
        )
    return tuple(_number(name, values[name]) for name in _NUMBERS[kind])


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise InputError(
            f"--input: {name} is {value!r} in config.json; it must be a number greater than 0; "
            "restore it"
        )
    return float(value)
