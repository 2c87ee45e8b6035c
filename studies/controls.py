"""Where the ODE's lead comes from: models between it and the baseline, each at its best rate.

    python -m studies.controls --text=stdlib
    python -m studies.controls --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

The docstring of `sweep_controls` lists the models.
"""

from studies.study import run_study
from t5x_diffeq.config.config_files import values_of
from t5x_diffeq.experiments.experiment import Keys, Sweep, Trainee

_N = "model.num_steps"


def _changes(keys: Keys, defaults: Keys) -> bool:
    """Whether the keys differ from what the config has."""
    return any(callable(x) or defaults[key] != x for key, x in keys.items())


def sweep_controls(config: str, rates: tuple[float, ...], size: str = "", seeds: int = 3) -> Sweep:
    """Where the lead over the per-layer baseline comes from: models between it and `:compact`.

    First the baseline with one of `:compact`'s choices, except its weights:

        decay 0.5             weight decay of the ODEs
        large embeddings      embeddings of tokens and positions of three times the size
        slow kernels          half the learning rate for kernels, as for W0 and P together
        fast vectors          30 times the learning rate for the biases and the norms
        Euler                 Euler's scheme instead of Lie-Trotter's
        all but fast vectors  the four others together
        Muon                  Muon instead of Adam; `:compact` and the ODE have it, too

    Then `:compact` with one of the baseline's choices, and models between `:compact` and `:ode`:

        common rate           e(t) at the common learning rate
        decay 0.1             weight decay of the baseline
        Lie-Trotter           the baseline's scheme and step size
        frozen e              the baseline as W0 + P e_n with a table e, which isn't trained
        constant e            the ODE with one W, W0 + P e, for all times
        table, frozen table   the ODE with a free table e_n in place of sinusoids and their MLP

    Args:
      config: the config's file.
      rates: the learning rates to begin with.
      size: what follows a variant's name in the config, such as "-32".
      seeds: the default of --seeds.
    """
    decay, factors = "optimizer.weight_decay", "optimizer.role_multipliers"
    euler: Keys = {"model.scheme": "euler", "model.step_size": "1/N"}
    large: Keys = {"model.embedding_scale": 3.0, "model.position_scale": 3.0}
    slow: Keys = {factors: (("kernel", 0.5),)}
    vectors = tuple((role, 30.0) for role in ("bias", "scale", "shift"))
    muon: Keys = {"optimizer.name": "muon"}
    table: Keys = {"model.time_basis": lambda defaults: f"table:{defaults[_N]}"}
    frozen: Keys = {**table, factors: (("time_embedding", 0.0),)}
    by_variant: dict[str, dict[str, Keys]] = {
        "baseline": {
            "": {},
            "decay 0.5": {decay: 0.5},
            "large embeddings": large,
            "slow kernels": slow,
            "fast vectors": {factors: vectors},
            "Euler": euler,
            "all but fast vectors": {decay: 0.5, **large, **slow, **euler},
            "Muon": muon,
            "frozen e": {"model.weights": "time_dependent", **frozen},
        },
        "compact": {
            "": {},
            "common rate": {factors: ()},
            "decay 0.1": {decay: 0.1},
            "Lie-Trotter": {"model.scheme": "lie_trotter", "model.step_size": "1"},
            "Muon": muon,
        },
        "ode": {
            "": {},
            "Muon": {**muon, factors: (("time_embedding", 1.0),)},  # by default e(t) is frozen
            "constant e": {"model.time_basis": "legendre:1"},
            "table": table,
            "frozen table": frozen,
        },
    }
    return Sweep(
        trainings=tuple(
            Trainee(variant + size, keys, ", ".join(filter(None, (variant, name))), config, rates)
            for variant, controls in by_variant.items()
            for name, keys in controls.items()
            if not keys or _changes(keys, values_of(config, variant + size))
        ),
        seeds=seeds,
    )


LAPTOP = sweep_controls("ladder.py", (8e-3, 1.6e-2), "-32")
PAPER = sweep_controls("gpt_small.py", (3e-4, 6e-4, 1.2e-3), seeds=1)

if __name__ == "__main__":
    run_study("controls", __doc__, LAPTOP, PAPER)
