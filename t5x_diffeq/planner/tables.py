"""Plans as tables for people, and as JSON."""

from dataclasses import asdict

from t5x_diffeq.planner.collectives import Traffic
from t5x_diffeq.planner.estimate import ASSUMED, ASSUMED_OF_GPUS, StepTimes
from t5x_diffeq.planner.planning import Plan
from t5x_diffeq.system.chips import GIB
from t5x_diffeq.system.console import align, format_count, log
from t5x_diffeq.training.partitioning import describe_mesh

_GPU_SHARE = 0.75  # of a GPU's memory, what JAX preallocates by default


def plan_record(plan: Plan) -> dict[str, object]:
    """A plan as JSON: bytes are of one device, FLOPs of all."""
    m, f, times = plan.memory, plan.flops, plan.times
    return {
        "topology": plan.topology.name,
        "slices": plan.topology.slices,
        "nodes": plan.topology.nodes,
        "mesh": dict(plan.setup.mesh.shape),
        "device_kind": plan.topology.kind,
        "compiled_by": plan.topology.compiled_by,
        "remat": plan.setup.model.config.remat,
        "microbatches": plan.setup.config.train.microbatches,
        "attention": plan.setup.model.config.attention,
        "compiler_options": plan.setup.step_options,
        "batch_size": plan.batch_size,
        "fits": m.fits,
        "memory": asdict(m),
        "flops": {**asdict(f), "model": f.model, "total": f.total},
        "memory_traffic": plan.cost and plan.cost.memory_bytes,
        "collectives": _traffic_record(plan.traffic),
        "between_nodes": _traffic_record(plan.between_nodes),
        "seconds": times and asdict(times),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
    }


def _traffic_record(moved: dict[str, Traffic] | None) -> dict[str, dict[str, int]] | None:
    return None if moved is None else {kind: moved[kind]._asdict() for kind in moved}


def _table_rows(plan: Plan) -> dict[str, dict[str, float | None]]:
    m, f, t = plan.memory, plan.flops, plan.times
    moved, crossing = plan.traffic or {}, (plan.between_nodes or {}).values()
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
            **{kind: it.bytes for kind, it in moved.items()},
            "of these, between slices or nodes": sum(each.bytes for each in crossing),
            "zeros in all-reduces": sum(it.padding for it in moved.values()),
        },
        "FLOPs": {
            "model, all devices": f.model,
            "making W(t)": f.hypernetwork,
            "computed again backward": f.recomputed,
        },
        "ms": {}
        if t is None
        else {
            "compute": 1e3 * t.compute,
            "attention kernels": 1e3 * t.kernels,
            "collectives waited for": 1e3 * t.waited,
            "their latency": 1e3 * t.latency,
            "collectives overlapped": 1e3 * t.overlapped,
            "step, low": 1e3 * t.low,
            "step, high": 1e3 * t.high,
        },
        "%": {
            "MFU, low": plan.mfu and 100 * plan.mfu[0],
            "MFU, high": plan.mfu and 100 * plan.mfu[1],
        },
    }


def print_plans(plans: dict[str, Plan]) -> None:
    """Prints the table, with ratios if there are two plans; lines without numbers are left out."""
    columns = [_table_rows(plan) for plan in plans.values()]
    lines = [["", *plans, *(["ratio"] if len(plans) == 2 else [])]]
    for unit in columns[0]:
        for name in dict.fromkeys(name for column in columns for name in column[unit]):
            values = [column[unit].get(name) for column in columns]
            cells = [_cell(value, unit) for value in values]
            if len(values) == 2:
                first, second = values
                cells.append(f"{first / second:.3f}" if first and second else "")
            if any(values):
                lines.append([name, *cells])
    log(*align(lines))
    for name, plan in plans.items():
        log(*(f"{name}: {line}" for line in (verdict(plan), *_remarks(plan))))
    topology = next(iter(plans.values())).topology
    if any(plan.times for plan in plans.values()):
        log(*(ASSUMED_OF_GPUS if topology.gpus else ASSUMED))


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / GIB:.4g} GiB" if value >= GIB / 100 else f"{value / 2**20:.4g} MiB"
    if unit == "FLOPs":
        return f"{value / 1e15:.4g} PFLOP" if value >= 1e14 else f"{value / 1e12:.4g} TFLOP"
    return f"{value:.4g} {unit}"


def verdict(plan: Plan) -> str:
    """Whether the step fits into a device's memory, and how fast it may be."""
    m = plan.memory
    if m.available is None:
        return f"needs {m.needed / GIB:.2f} GiB per device; this kind's memory is unknown"
    share = f"{m.needed / GIB:.2f} GiB of {m.available / GIB:.2f} per device"
    if not m.fits:
        return f"does not fit: {share}; --sweep looks for flags with which it does"
    rates, mfus = plan.tokens_per_second, plan.mfu
    if plan.times is None or rates is None or mfus is None:
        return f"fits: {share}"
    slowest, fastest = rates
    low, high = (f"{100 * mfu:.0f}" for mfu in mfus)
    return (
        f"fits: {share}; {_step_range(plan.times)}, {format_count(slowest)} to "
        f"{format_count(fastest)} tokens/s, MFU {low} to {high}%"
    )


def _step_range(times: StepTimes) -> str:
    low, high = (
        f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (1e3 * times.low, 1e3 * times.high)
    )
    return f"{low} to {high} ms a step"


def _remarks(plan: Plan) -> list[str]:
    compiled = {} if plan.topology.compiled_by == "cpu" else plan.traffic or {}
    options = ", ".join(f"{name}={value}" for name, value in plan.setup.step_options.items())
    lines = [f"compiled with {options}"] if options else []
    lines += [_describe_collectives(kind, it) for kind, it in compiled.items() if it.executions]
    if plan.cost and plan.cost.unestimated_bytes:
        moved = _cell(plan.cost.unestimated_bytes, "bytes")
        lines.append(
            f"the compiler has no estimate for operations that move {moved}; they count at the "
            "memory's bandwidth"
        )
    share = memory_share(plan)
    return [*lines, share] if share else lines


def _describe_collectives(kind: str, moved: Traffic) -> str:
    beside = moved.executions - moved.synchronous
    line = f"{kind}: {moved.executions}, {moved.synchronous} waited for, {beside} beside other work"
    if not moved.padded:
        return line
    return (
        f"{line}; {moved.padded} are gathers that the compiler made of all-reduces, in buffers "
        f"with {_cell(moved.padding, 'bytes')} of zeros; a smaller mesh.fsdp may avoid them"
    )


def memory_share(plan: Plan) -> str | None:
    """The memory setting that JAX needs on a GPU, if the default is too small."""
    m = plan.memory
    if not (plan.topology.gpus and m.available and m.fits and m.needed > _GPU_SHARE * m.available):
        return None
    return (
        f"it needs {m.needed / m.available:.0%} of the GPU's memory, and JAX takes "
        f"{_GPU_SHARE:.0%}: set XLA_CLIENT_MEM_FRACTION=0.92, as the scripts in launch/ do"
    )


def show_ranked(ranked: list[tuple[str, Plan]]) -> None:
    """Prints plans and the flags that make them, the best one first."""
    lines = [["mesh", "remat", "needed", "step", "flags"]]
    for flags, plan in ranked:
        mesh, remat = describe_mesh(dict(plan.setup.mesh.shape)), plan.setup.model.config.remat
        step = _step_range(plan.times).removesuffix(" a step") if plan.times else ""
        needed = _cell(plan.memory.needed, "bytes")
        lines.append([mesh, remat, needed, step, flags])
    log(*align(lines, left=(0, 4)))
