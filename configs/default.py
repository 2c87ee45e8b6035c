"""The config that has every key, at its default; other config files change some of them.

docs/keys.md gives each key's meaning, values and where it may differ. It is generated from
t5x_diffeq/config/keys/, where defaults are set.
"""

from ml_collections import ConfigDict

from t5x_diffeq.config.config_files import default_config


def get_config() -> ConfigDict:
    """A small ODE transformer of GPT's shape, on text that every machine has."""
    return default_config()


# The keys that the variant after the colon of a config file sets.
_ODE = {
    "weights": "time_dependent",
    "scheme": "euler",
    "step_size": "1/N",
}
VARIANTS = {
    "ode": _ODE,
    "compact": _ODE,  # and what _set_compact sets
    "smooth": _ODE,  # and what _set_smooth sets
    "shared": {
        "weights": "shared",
        "scheme": "euler",
        "step_size": "1/N",
    },
    "baseline": {
        "weights": "per_layer",
        "scheme": "lie_trotter",
        "step_size": "1",
    },
    # The ODEs' scheme and step size with per-layer weights: the control for W(t) alone.
    "euler": {
        "weights": "per_layer",
        "scheme": "euler",
        "step_size": "1/N",
    },
}

_FAST_TIME_EMBEDDING = (("time_embedding", 30.0),)  # of compact and smooth
ODES = tuple(name for name, keys in VARIANTS.items() if keys["weights"] == "time_dependent")


def set_variant(config: ConfigDict, variant: str) -> ConfigDict:
    """Sets weights, scheme and step size together; returns the config.

    `compact` and `smooth` also set the keys of the functions below; the sizes of their time
    embeddings follow from `model.num_steps` as it is when this is called.

    Raises:
      ValueError: if there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown; there are {', '.join(VARIANTS)}")
    config.model.update(VARIANTS[variant])
    if variant == "compact":
        _set_compact(config)
    if variant == "smooth":
        _set_smooth(config)
    return config


def _set_compact(config: ConfigDict) -> None:
    """Fewer functions of time than steps, trained at 30 times the learning rate.

    docs/lab/compact.md has what was measured.
    """
    steps = config.model.num_steps
    config.model.init = "invariant"
    config.model.time_basis = f"table:{steps}"
    config.model.time_embed_dim = max(steps - 1, 1)
    config.model.attention_time_embed_dim = max(steps // 3, 1)
    config.optimizer.role_multipliers = _FAST_TIME_EMBEDDING


def _set_smooth(config: ConfigDict) -> None:
    """A few polynomials of time, and embeddings so large that no single step dominates them.

    docs/lab/smooth.md has what was measured.
    """
    model, count = config.model, max(config.model.num_steps // 3, 2)
    model.init = "invariant"
    model.time_basis = f"legendre:{count}"
    model.time_embed_dim = count
    model.embedding_scale = 3.0
    if model.architecture == "gpt":
        model.position_scale = 3.0
    config.optimizer.role_multipliers = _FAST_TIME_EMBEDDING
    config.train.velocity_penalty = 0.1
