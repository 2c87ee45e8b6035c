"""Models whose optimizer steps take turns, and what they cost beside each other."""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.config_files import baseline_of
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.planner.program_cost import product_flops, program_cost
from t5x_diffeq.planner.vocabulary import planned_vocab_size
from t5x_diffeq.system.console import Progress, track
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.depths import depths_to_come
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.setup import Setup, make_setup
from t5x_diffeq.training.step import lower_train_step

_WARM_UP_STEPS = 2  # rounds that are not counted
_QUARTILES = "step_ms_quartiles"
RATIO = "model / "  # before the other model's name


class Candidate:
    """A model with its compiled optimizer step, its train state and a batch.

    The step is on the grids of `depths`; None is the model's own.
    """

    def __init__(self, name: str, config: Config, depths: tuple[int, ...] | None = None):
        self.name, self.batch_size, self.depths = name, config.train.batch_size, depths
        self.setup: Setup = make_setup(config, planned_vocab_size(config))
        run_checks("benchmark", config, self.setup)
        with self.setup.context(), Progress(f"compiling the step of {name}"):
            self.compiled = lower_train_step(self.setup, self.batch_size, depths).compile()
            self.state: TrainState = self.setup.init_state()
            self.batch: Batch = self._random_batch()
        self.seconds: list[float] = []

    def _random_batch(self) -> Batch:
        shapes = self.setup.abstract_batch(self.batch_size)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.setup.model.config.vocab_size, shapes["inputs"].shape)
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        arrays = {"inputs": tokens, "targets": tokens, "mask": np.ones(tokens.shape)}
        arrays |= {"segments": np.zeros(tokens.shape), "positions": positions}
        return {
            name: jax.device_put(array.astype(shapes[name].dtype), shapes[name].sharding)
            for name, array in arrays.items()
            if name in shapes
        }

    def step(self) -> None:
        """Runs and times one optimizer step."""
        start = time.perf_counter()
        self.state, *others = self.compiled(self.state, self.batch, self.setup.schedule)
        jax.block_until_ready((self.state, others))
        self.seconds.append(time.perf_counter() - start)

    def results(self) -> dict[str, Any]:
        """Step time; FLOPs on all devices; memory and memory traffic of one device."""
        memory, program = self.compiled.memory_analysis(), self.compiled.as_text()
        assert memory is not None and program is not None  # CPUs, GPUs and TPUs all have them
        return {
            "step_ms": 1e3 * statistics.median(self.seconds),
            _QUARTILES: _quartiles(1e3 * np.array(self.seconds)),
            "parameters": sum(x.size for x in jax.tree.leaves(self.setup.abstract_state.params)),
            "state_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "flops": self._count_flops(),
            "bytes_accessed": program_cost(program).memory_bytes,
        }

    def _count_flops(self) -> int:
        """FLOPs of a step's matrix products on the whole batch, recomputation included."""
        # The text of a program with attention kernels doesn't have their FLOPs.
        plain = LanguageModel(replace(self.setup.model.config, attention="xla"))
        setup = replace(self.setup, model=plain)  # outside its context, the program isn't sharded
        text = lower_train_step(setup, self.batch_size, self.depths).as_text(dialect="hlo")
        assert text is not None  # every lowered program has one
        return product_flops(text)


def _candidates(config: Config, others: Mapping[str, Config]) -> Iterator[Candidate]:
    if others:
        yield from (Candidate(name, other) for name, other in others.items())
        return
    if config.train.trainable:
        full = {"train.trainable": (), "model.adapter_rank": 0}
        yield Candidate("full", config.with_values(full))
    else:
        yield Candidate("baseline", baseline_of(config))
    if config.train.microbatches > 1:
        yield Candidate("whole batch", config.with_values({"train.microbatches": 1}))
    if config.optimizer.name != "adam":
        yield Candidate("adam", config.with_values({"optimizer.name": "adam"}))
    for depths in depths_to_come(config, 0) if config.train.depths else ():
        if depths != (config.model.num_steps,):
            name = ("depths " if depths[1:] else "depth ") + ", ".join(map(str, depths))
            yield Candidate(name, config, depths)


def compare_models(config: Config, others: Mapping[str, Config], rounds: int) -> list[dict]:
    """Results of the model and of the models that it is compared with, and their ratios.

    Without others, it is compared with its per-layer baseline; with microbatches also with itself
    on the whole batch at once; with another optimizer than Adam also with itself and Adam; with
    `train.depths` also with its steps on the grids that training draws. A model with frozen parts,
    as in LoRA, is compared with the same model without adapters, in which everything trains.

    Args:
      rounds: number of timed steps of each model.
    """
    for each in (config, *others.values()):
        run_checks("benchmark", each)
    candidates = [Candidate("model", config), *_candidates(config, others)]
    for _ in track(range(_WARM_UP_STEPS), "warming up", _WARM_UP_STEPS, "rounds"):
        for candidate in candidates:
            candidate.step()
    for candidate in candidates:
        candidate.seconds.clear()
    for _ in track(range(rounds), "timing the steps", rounds, "rounds"):
        for candidate in candidates:
            candidate.step()
    results: list[dict[str, Any]] = [{"name": c.name, **c.results()} for c in candidates]
    model, *rest = results
    ratios = []
    for candidate, other in zip(candidates[1:], rest, strict=True):
        ratio = {k: model[k] / other[k] for k in model if k not in ("name", _QUARTILES)}
        # A ratio per round: the steps of a round find the machine equally busy.
        by_round = np.divide(candidates[0].seconds, candidate.seconds)
        name = f"{RATIO}{other['name']}"
        ratios.append({"name": name, _QUARTILES: _quartiles(by_round), **ratio})
    return [*results, *ratios]


def _quartiles(values: np.ndarray) -> list[float]:
    """The first and the third quartile."""
    return np.quantile(values, (0.25, 0.75)).tolist()
