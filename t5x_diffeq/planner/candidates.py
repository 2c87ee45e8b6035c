"""Searches for the fastest plan of a config on a topology, in stages, skipping what can't win.

First the meshes at the config's own remat policy, the most promising by their lower bound first.
Then the other remat policies on the best two meshes, then microbatches and attention's blocks on
the best plan. What can't fit, or whose lower bound exceeds the best estimate, is never compiled.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from t5x_diffeq.planner.bounds import Bound, lower_bound
from t5x_diffeq.planner.planning import Plan, plan_setup
from t5x_diffeq.planner.search import (
    Changes,
    as_flags,
    with_details,
    with_meshes,
    with_remats,
)
from t5x_diffeq.planner.topology import Topology
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.console import format_duration, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.mesh_checks import check_microbatches

_BEST_MESHES = 2  # on which the other remat policies are tried


def _slowness(plan: Plan) -> float:
    """What plans are ranked by: the middle of the estimate, or bytes moved if there is none."""
    if plan.times:
        return plan.times.middle
    assert plan.cost and plan.traffic is not None  # it was compiled, so it fits or may fit
    return plan.cost.memory_bytes + sum(moved.bytes for moved in plan.traffic.values())


@dataclass
class PlanSearch:
    """A search, and what it has found.

    Attributes:
      config: the config to plan.
      vocab_size: the vocabulary size of its tokenizer.
      topology: the topology to plan for.
      compile: makes the plan of a config, given a title that shows the search's progress.
      results: the plans that fit or may fit, with their changes; the fastest first.
    """

    config: Config
    vocab_size: int
    topology: Topology
    compile: Callable[[str, Config], Plan]
    results: list[tuple[Changes, Plan]] = field(default_factory=list)
    skipped: int = 0

    def run(self) -> list[tuple[Changes, Plan]]:
        """Runs all stages.

        Raises:
          InputError: if nothing fits.
        """
        devices = len(self.topology.devices)
        self._stage("meshes", with_meshes(self.config, devices, self.topology.slices))
        if not self.results:
            self._stage("meshes", with_meshes(self.config, devices, self.topology.slices), "full")
        if not self.results:
            raise InputError(
                f"--sweep: nothing fits {self.topology.name}; take a larger topology, or a smaller "
                "model or batch (plan without --sweep says how much is needed)"
            )
        for mesh, _ in list(self.results[:_BEST_MESHES]):
            self._stage("remat", [mesh | other for other in with_remats(self.config)])
        best, plan = self.results[0]
        attention = plan.setup.model.config.attention
        details = with_details(self.config.with_values(best), attention)
        self._stage("details", [best | other for other in details])
        return self.results

    def _stage(self, name: str, candidates: Sequence[Changes], remat: str | None = None) -> None:
        """Compiles those of the candidates that can win, the most promising first."""
        if remat:
            candidates = [keys | {"model.remat": remat} for keys in candidates]
        bounds = [(bound, keys) for keys in candidates if (bound := self._bound(keys))]
        order = sorted(bounds, key=lambda b: b[0].seconds)
        start, compiled = time.perf_counter(), 0
        for number, (bound, keys) in enumerate(order, start=1):
            if self._is_hopeless(bound):
                self.skipped += 1
                continue
            title = f"{name}, {number} of at most {len(order)}"
            if compiled:
                mean = (time.perf_counter() - start) / compiled
                title += f", at most {format_duration(mean * (len(order) - number + 1))} left"
            plan = self.compile(title, self.config.with_values(keys))
            compiled += 1
            if plan.memory.fits is not False:
                self.results.append((keys, plan))
                self.results.sort(key=lambda found: _slowness(found[1]))

    def _bound(self, keys: Changes) -> Bound | None:
        """A candidate's lower bound; None, with a message, if its config can't be used."""
        try:
            other = self.config.with_values(keys)
            setup = plan_setup(other, self.vocab_size, self.topology)
            check_microbatches(other.train, setup.mesh)
        except InputError as error:
            say(f"left out: {as_flags(keys)}: {error}")
            return None
        figures = self.topology.figures
        return lower_bound(setup, other.train.batch_size, figures) if figures else Bound(0, 0)

    def _is_hopeless(self, bound: Bound) -> bool:
        figures = self.topology.figures
        if figures and bound.bytes > figures.memory_bytes:
            return True
        times = self.results[0][1].times if self.results else None
        return times is not None and bound.seconds > times.low
