"""Compiles a config's train step for chips that you don't have: --config=FILE --topology=v5p:4x4x4.

Says whether it fits, what it computes and moves, and how long it may take, next to the per-layer
baseline of the same shape. --slices=2 plans two TPU slices. --topology=h100:8x8 plans eight nodes
of eight GPUs (also a100, h200, b200). The compilers are in t5x_diffeq[tpu] and
t5x_diffeq[gpu_compiler], and need neither TPU nor GPU; --topology=cpu:8 is for a quick look.
--sweep searches meshes, remat policies, microbatches and block sizes of attention for plans that
fit, and prints the flags of the fastest. Nothing is run.
Prints tables on standard error and one JSON object per model on standard output. The model and its
baseline are compiled one after the other. For TPUs, compiling takes about 15 CPU seconds for a
tiny model and 120 to 210 for a 1B model (as many seconds on an idle core); for GPUs, about 10 for a
1B model. A sweep compiles up to about twenty steps.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.config_files import baseline_of
from t5x_diffeq.system.console import log, print_result
from t5x_diffeq.system.errors import InputError

if TYPE_CHECKING:
    from t5x_diffeq.planner.planning import Plan
    from t5x_diffeq.planner.topology import Topology

_SECONDS_BETWEEN_LINES = 10

FLAGS = VerbFlags(__name__)
CONFIG = FLAGS.define_config("Config file of the model.")
_TOPOLOGY = FLAGS.define_text(
    "topology", "TPUs, such as v5p:4x4x4; GPUs, such as h100:8 or h100:8x8; or cpu:8."
)
_SLICES = FLAGS.define_integer("slices", "Number of TPU slices.", 1)
_SWEEP = FLAGS.define_switch("sweep", "Search for the fastest plan that fits, and print its flags.")


def main() -> None:
    """Runs the verb."""
    if CONFIG.value is None or _TOPOLOGY.value is None:
        raise InputError("plan needs --config=FILE and --topology=v5p:4x4x4; see --help")

    from t5x_diffeq.planner.topology import make_topology  # importing JAX takes seconds
    from t5x_diffeq.training.checks import run_checks

    config = Config.of(CONFIG.value)
    run_checks("plan", config)
    topology = make_topology(_TOPOLOGY.value, _SLICES.value)
    (sweep if _SWEEP.value else show_plans)(config, topology)


def make_plan(name: str, config: Config, topology: "Topology") -> "Plan":
    """Makes the plan of a config; prints a line when it is compiled."""
    from t5x_diffeq.planner.planning import plan_setup, plan_step
    from t5x_diffeq.planner.vocabulary import planned_vocab_size
    from t5x_diffeq.training.partitioning import describe_mesh

    setup = plan_setup(config, planned_vocab_size(config), topology)
    start = time.perf_counter()
    plan = plan_step(setup, config.train.batch_size, topology)
    took = f"compiled in {time.perf_counter() - start:.0f} s"
    log(f"{name}: {describe_mesh(dict(setup.mesh.shape))}, remat {config.model.remat}, {took}")
    return plan


def _make_plans(configs: dict[str, Config], topology: "Topology") -> "dict[str, Plan]":
    start, cpu = time.perf_counter(), time.process_time()
    # One worker: JAX can't trace splash attention's kernel in two threads at once (jax 0.10.2).
    with ThreadPoolExecutor(max_workers=1) as pool:
        futures = {name: pool.submit(make_plan, name, c, topology) for name, c in configs.items()}
        while pending := wait(futures.values(), _SECONDS_BETWEEN_LINES).not_done:
            left = ", ".join(name for name, future in futures.items() if future in pending)
            log(f"compiling {left}: {time.perf_counter() - start:.0f} s")
        plans = {name: future.result() for name, future in futures.items()}
    log(f"that took {time.process_time() - cpu:.0f} s of CPU time")
    return plans


def _print_plan(name: str, plan: "Plan") -> None:
    from t5x_diffeq.planner.tables import plan_record

    print_result(json.dumps({"name": name, **plan_record(plan)}))


def sweep(config: Config, topology: "Topology") -> None:
    """Searches for the fastest plan; prints a JSON line per plan, then a table and flags."""
    from t5x_diffeq.planner.search import as_flags, search
    from t5x_diffeq.planner.tables import show_ranked
    from t5x_diffeq.planner.vocabulary import planned_vocab_size

    def compile_plan(title: str, other: Config) -> "Plan":
        (plan,) = _make_plans({title: other}, topology).values()
        _print_plan("model", plan)
        return plan

    fitting = search(config, planned_vocab_size(config), topology, compile_plan)
    ranked = [(as_flags(changes), plan) for changes, plan in fitting]
    show_ranked(ranked)
    log("fastest:", ranked[0][0])


def show_plans(config: Config, topology: "Topology") -> None:
    """Prints plans of the model and its baseline."""
    from t5x_diffeq.model.ode.sources import source_of
    from t5x_diffeq.planner.tables import print_plans

    configs = {"model": config}
    if source_of(config.model).any_time:
        configs["baseline"] = baseline_of(config)
    plans = _make_plans(configs, topology)
    print_plans(plans)
    for name, plan in plans.items():
        _print_plan(name, plan)
