"""Plans: optimizer steps compiled for absent chips, compared, searched and shown."""

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait

from t5x_diffeq.ode.sources import source_of
from t5x_diffeq.planner.planning import Plan, plan_setup, plan_step
from t5x_diffeq.planner.search import as_flags, search
from t5x_diffeq.planner.tables import plan_record, print_plans, show_ranked
from t5x_diffeq.planner.topology import Topology
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.config_files import baseline_of
from t5x_diffeq.runtime.console import say
from t5x_diffeq.training.partitioning import describe_mesh
from t5x_diffeq.training.setup import expected_vocab_size

_SECONDS_BETWEEN_LINES = 10


def make_plan(name: str, config: Config, where: Topology) -> Plan:
    """Makes the plan of a config; prints a line when it is compiled."""
    setup = plan_setup(config, expected_vocab_size(config), where)
    start = time.perf_counter()
    plan = plan_step(setup, config.train.batch_size, where)
    took = f"compiled in {time.perf_counter() - start:.0f} s"
    say(f"{name}: {describe_mesh(dict(setup.mesh.shape))}, remat {config.model.remat}, {took}")
    return plan


def _make_plans(configs: dict[str, Config], where: Topology) -> dict[str, Plan]:
    start, cpu = time.perf_counter(), time.process_time()
    # One worker: JAX can't trace splash attention's kernel in two threads at once (jax 0.10.2).
    with ThreadPoolExecutor(max_workers=1) as pool:
        made = {name: pool.submit(make_plan, name, c, where) for name, c in configs.items()}
        while pending := wait(made.values(), _SECONDS_BETWEEN_LINES).not_done:
            left = ", ".join(name for name, future in made.items() if future in pending)
            say(f"compiling {left}: {time.perf_counter() - start:.0f} s")
        plans = {name: future.result() for name, future in made.items()}
    say(f"that took {time.process_time() - cpu:.0f} s of CPU time")
    return plans


def _compare_plans(config: Config, where: Topology) -> dict[str, Plan]:
    configs = {"model": config}
    if source_of(config.model).any_time:
        configs["baseline"] = baseline_of(config)
    return _make_plans(configs, where)


def _print_plan(name: str, plan: Plan) -> None:
    print(json.dumps({"name": name, **plan_record(plan)}), flush=True)


def sweep(config: Config, where: Topology) -> None:
    """Searches for the fastest plan; prints a JSON line per plan, then a table and flags."""

    def compile_plan(title: str, other: Config) -> Plan:
        (plan,) = _make_plans({title: other}, where).values()
        _print_plan("model", plan)
        return plan

    fitting = search(config, expected_vocab_size(config), where, compile_plan)
    ranked = [(as_flags(changes), plan) for changes, plan in fitting]
    show_ranked(ranked)
    say("fastest:", ranked[0][0])


def show_plans(config: Config, where: Topology) -> None:
    """Prints plans of the model and its baseline."""
    plans = _compare_plans(config, where)
    print_plans(plans)
    for name, plan in plans.items():
        _print_plan(name, plan)
