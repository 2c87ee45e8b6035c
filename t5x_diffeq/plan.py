"""Compiles a config's train step for chips that you don't have: --config=FILE --topology=v5p:4x4x4.

Tells whether it fits, what it computes and moves, and how long it may take, beside the per-layer
baseline of the same shape; if it doesn't fit, what would. --topology=cpu:8 is for a quick look.
--sweep tries meshes and remat policies. Nothing is run. Prints tables on standard error and one
JSON object per model on standard output. A step of a 1B model compiles in about a minute.
"""

import copy
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import jax
from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from t5x_diffeq import command_line
from t5x_diffeq.benchmark import vocab_size
from t5x_diffeq.errors import InputError
from t5x_diffeq.report import count, say
from t5x_diffeq.training.chips import GIB
from t5x_diffeq.training.partitioning import describe
from t5x_diffeq.training.plan_search import remedies, sweep_configs
from t5x_diffeq.training.planning import Plan, plan_step
from t5x_diffeq.training.setup import make_setup
from t5x_diffeq.training.topology import topology_devices

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file of the model.", flag_values=FLAGS
)
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Of TPUs, as v5p:4x4x4 or v6e:16x16; or cpu:8.", flag_values=FLAGS
)
SWEEP = flags.DEFINE_bool(
    "sweep", False, "Try meshes and remat policies, and rank those that fit.", flag_values=FLAGS
)

Devices = Sequence[jax.Device]


def make_plan(name: str, config: ConfigDict, devices: Devices) -> Plan:
    """The plan of a config, and a line when it is compiled."""
    setup = make_setup(config, vocab_size(config), devices)
    begun = time.perf_counter()
    plan = plan_step(setup, config.train.batch_size)
    took = f"compiled in {time.perf_counter() - begun:.0f} s"
    say(f"{name}: {describe(dict(setup.mesh.shape))}, remat {config.model.remat}, {took}")
    return plan


def compare(config: ConfigDict, devices: Devices) -> dict[str, Plan]:
    """Plans of the model and, if it isn't one itself, of its baseline."""
    plans = {"model": make_plan("model", config, devices)}
    if config.model.weights != "per_layer":
        baseline = copy.deepcopy(config)
        importlib.import_module("configs.default").set_variant(baseline, "baseline")
        plans["baseline"] = make_plan("baseline", baseline, devices)
    return plans


def record(plan: Plan) -> dict[str, object]:
    """A plan as JSON: bytes are of one device, FLOPs of all."""
    m, f, times = plan.memory, plan.flops, plan.times
    return {
        "mesh": dict(plan.setup.mesh.shape),
        "device_kind": plan.setup.mesh.devices.flat[0].device_kind,
        "remat": plan.setup.model.config.remat,
        "attention": plan.setup.model.config.attention,
        "batch_size": plan.batch_size,
        "fits": m.fits,
        "memory": asdict(m),
        "flops": {**asdict(f), "model": f.model, "total": f.total},
        "memory_traffic": plan.cost and plan.cost.memory_bytes,
        "collectives": plan.traffic and {k: t._asdict() for k, t in plan.traffic.items()},
        "seconds": times and {**asdict(times), "step": times.step},
        "optimal_seconds": plan.optimal_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
    }


def tell(name: str, plan: Plan) -> None:
    """A plan on standard output."""
    print(json.dumps({"name": name, "topology": TOPOLOGY.value, **record(plan)}), flush=True)


def rows(plan: Plan) -> dict[str, dict[str, float | None]]:
    """The table's lines, by unit."""
    m, f, t = plan.memory, plan.flops, plan.times
    return {
        "bytes": {
            "parameters": m.parameters,
            "optimizer moments": m.moments,
            "state and batch, padded": m.arguments,
            "outputs beside the state": m.outputs,
            "temporaries": m.temporaries,
            "program": m.program,
            "needed": m.needed,
            "there is": m.available,
            "to and from memory": plan.cost and plan.cost.memory_bytes,
            **{kind: moved.bytes for kind, moved in (plan.traffic or {}).items()},
        },
        "FLOPs": {
            "model, all devices": f.model,
            "making W(t)": f.hypernetwork,
            "computed again backward": f.recomputed,
        },
        "ms": {
            "compute": t and 1e3 * t.compute,
            "attention kernels": t and 1e3 * t.kernels,
            "collectives waited for": t and 1e3 * t.waited,
            "collectives overlapped": t and 1e3 * t.overlapped,
            "step": t and 1e3 * t.step,
        },
        "%": {"MFU": plan.mfu and 100 * plan.mfu},
    }


def show(plans: dict[str, Plan]) -> None:
    """The table, with a column of ratios if there are two; lines without a number are left out."""
    columns = [rows(plan) for plan in plans.values()]
    heads = [*plans, "ratio"] if len(plans) == 2 else list(plans)
    say(f"{'':<26}" + "".join(f"{head:>14}" for head in heads))
    for unit in columns[0]:
        for name in dict.fromkeys(name for column in columns for name in column[unit]):
            values = [column[unit].get(name) for column in columns]
            cells = [cell(value, unit) for value in values]
            if len(values) == 2:
                cells.append(f"{values[0] / values[1]:.3f}" if all(values) else "")
            if any(values):
                say(f"{name:<26}" + "".join(f"{text:>14}" for text in cells))
    for name, plan in plans.items():
        say(verdict(name, plan), *repeated(name, plan))


def cell(value: float | None, unit: str) -> str:
    """A number of the table with its unit; nothing if it isn't known."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / GIB:.4g} GiB" if value >= GIB / 100 else f"{value / 2**20:.4g} MiB"
    if unit == "FLOPs":
        return f"{value / 1e15:.4g} PFLOP" if value >= 1e14 else f"{value / 1e12:.4g} TFLOP"
    return f"{value:.4g} {unit}"


def verdict(name: str, plan: Plan) -> str:
    """Whether it fits, and how fast it may be."""
    m = plan.memory
    if m.fits is None:
        return f"{name}: needs {m.needed / GIB:.2f} GiB per device; what this kind has isn't known"
    if not m.fits:
        return (
            f"{name}: does not fit: {m.needed / GIB:.2f} GiB of {m.available / GIB:.2f} per device"
        )
    told = f"{name}: fits: {m.needed / GIB:.2f} GiB of {m.available / GIB:.2f} per device"
    if plan.times is None:
        return told
    return f"{told}; about {count(plan.tokens_per_second)} tokens/s, MFU {100 * plan.mfu:.0f}%"


def repeated(name: str, plan: Plan) -> list[str]:
    """What it costs that each part of the data axis has the whole state; nothing if it is one."""
    sizes = dict(plan.setup.mesh.shape)
    if sizes["data"] == 1:
        return []
    spared = (plan.memory.parameters + plan.memory.moments) * (1 - 1 / sizes["data"])
    return [
        f"{name}: mesh.data={sizes['data']} keeps as many copies of parameters and moments; "
        f"mesh.data=1 with mesh.fsdp={sizes['data'] * sizes['fsdp']} would spare "
        f"{cell(spared, 'bytes')} per device"
    ]


def advise(config: ConfigDict, plan: Plan, devices: Devices) -> None:
    """Compiles what may fit until something does, and says what that is."""
    say("looking for what does fit:")
    for change, other in remedies(config, dict(plan.setup.mesh.shape)):
        memory = make_plan(change, other, devices).memory
        needed = f"{memory.needed / GIB:.2f} GiB of {memory.available / GIB:.2f}"
        if memory.fits:
            say(f"fits with {change} ({needed})")
            return
        say(f"  not with {change} ({needed})")
    say("nothing tried fits: take a larger topology, or a smaller model")


def rank(plans: Sequence[Plan]) -> list[Plan]:
    """Those that fit, or may, the fastest first; without estimates, by bytes moved."""

    def slowness(plan: Plan) -> float:
        if plan.times:
            return plan.times.step
        return plan.cost.memory_bytes + sum(moved.bytes for moved in plan.traffic.values())

    return sorted((plan for plan in plans if plan.memory.fits is not False), key=slowness)


def sweep(config: ConfigDict, devices: Devices) -> None:
    """Plans of all meshes and remat policies: a JSON line as each is made, a table at the end."""
    configs, plans = list(sweep_configs(config, len(devices))), []
    for number, other in enumerate(configs, start=1):
        plans.append(make_plan(f"{number} of {len(configs)}", other, devices))
        tell("model", plans[-1])
    say(f"{'mesh':<34}{'remat':>10}{'needed':>12}{'step':>12}{'MFU':>10}")
    for plan in rank(plans):
        mesh, remat = describe(dict(plan.setup.mesh.shape)), plan.setup.model.config.remat
        needed, step = cell(plan.memory.needed, "bytes"), plan.times and 1e3 * plan.times.step
        percent = cell(plan.mfu and 100 * plan.mfu, "%")
        say(f"{mesh:<34}{remat:>10}{needed:>12}{cell(step, 'ms'):>12}{percent:>10}")
    say(f"{len(plans) - len(rank(plans))} of {len(plans)} don't fit")


def main() -> None:
    """The verb."""
    if CONFIG.value is None or TOPOLOGY.value is None:
        raise InputError("plan needs --config=FILE and --topology=v5p:4x4x4; see --help")
    config, devices = CONFIG.value, topology_devices(TOPOLOGY.value)
    if SWEEP.value:
        sweep(config, devices)
        return
    plans = compare(config, devices)
    show(plans)
    for name, plan in plans.items():
        tell(name, plan)
    if plans["model"].memory.fits is False:
        advise(config, plans["model"], devices)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
