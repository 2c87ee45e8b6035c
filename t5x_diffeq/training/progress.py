"""Prints what a run says of itself: an account at its start, evaluations, and the next commands.

`hyperparameters` describes the run to trackers: config, code, packages, devices, size, cost.
"""

import platform
import shlex
import subprocess
from importlib import metadata
from math import isclose, prod
from pathlib import Path

import jax
import jax.numpy as jnp
from clu import parameter_overview
from jax.sharding import Mesh

from t5x_diffeq.checkpoints.workdir import differing_keys, stored_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.plugins import foreign_plugins
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.examples import TrainingData
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.flops import mfu, step_flops
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import has_method
from t5x_diffeq.system import allocator
from t5x_diffeq.system.chips import chip
from t5x_diffeq.system.compilation_cache import ProgramCounts
from t5x_diffeq.system.console import format_count, format_duration, log, print_table
from t5x_diffeq.system.environment import KEEP_MEMORY
from t5x_diffeq.system.extras import python_command
from t5x_diffeq.system.files import AnyPath, write_whole
from t5x_diffeq.training.depths import full_grid_from
from t5x_diffeq.training.optimizers.schedule import learning_rate_schedule
from t5x_diffeq.training.partitioning import axes_across_slices, describe_mesh, num_slices
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.tracking.jsonl import read_metrics

_PACKAGES = ("t5x_diffeq", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_SECONDS_FOR_GIT = 10
_ROOT = Path(__file__).resolve().parents[2]  # the root of the clone, if there is one


def utilisation(setup: Setup, tokens_per_second: float) -> dict[str, float]:
    """`mfu`, the model FLOPs utilisation as a fraction of 1 (see flops.py).

    Empty where the device's peak or the block's FLOPs are unknown.
    """
    figures, c = chip(setup.mesh.devices.flat[0].device_kind), setup.model.config
    if figures is None or not has_method(c, "flops"):
        return {}
    seconds = c.max_length / tokens_per_second  # seconds per sequence
    return {"mfu": mfu(step_flops(c, 1).model, seconds, setup.mesh.size, figures.peak_flops)}


def eval_line(step: int, values: dict[str, float], loss_on: str, name: str = "eval") -> str:
    """The line of an evaluation.

    `eval at step 200: loss 3.1416, perplexity 23.14, 1.234 bits per byte on 65.5k tokens`
    """
    counted = "tokens" if loss_on == "all" else f"tokens of the {loss_on}s"
    bits = f", {values['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in values else ""
    return (
        f"{name.replace('_', ' of ')} at step {step}: loss {values['loss']:.4f}, "
        f"perplexity {values['perplexity']:.2f}"
        f"{bits} on {format_count(values['tokens'])} {counted}"
    )


def log_ready(
    depths: list[tuple[int, ...]], elapsed: float, seconds: float, programs: ProgramCounts
) -> None:
    """Prints that the steps, compiled in `seconds`, are ready `elapsed` seconds after the start."""
    took = f"to compile {describe_steps(depths)} took {seconds:.1f} s of it"
    log(f"ready after {elapsed:.1f} s; {took} ({programs})")


def describe_steps(depths: list[tuple[int, ...]]) -> str:
    """What is compiled: `the step`, or a step for each choice of numbers of solver steps."""
    if len(depths) == 1:
        return "the step"
    return f"a step for each of {', '.join('+'.join(map(str, each)) for each in depths)}"


def log_account(
    config: Config,
    setup: Setup,
    corpus: Corpus,
    training_data: TrainingData,
    workdir: AnyPath,
    start: int,
) -> None:
    """Prints what is about to run: devices, data, model, parameters, steps and epochs, workdir."""
    batch_size, total_steps = config.train.batch_size, config.train.total_steps
    tokens_per_step = batch_size * config.data.sequence_length
    c = setup.model.config
    # The reason why weights cross nodes if the config leaves `mesh.data` open (see `make_setup`).
    why_data = ", because a GPU has too little memory for its part of the state within one node"
    if setup.config.mesh.data == config.mesh.data:
        why_data = ""
    kept = f"what is freed stays with the process ({KEEP_MEMORY.name}=0 changes that)"
    print_table(
        f"{'continuing at step ' + str(start) if start else 'training'} in {workdir}",
        {
            "devices": describe_devices(setup.mesh) + why_data,
            "data": f"{corpus.name}: {training_data.size()} train, "
            f"{corpus.amount('validation')} validate; vocabulary {c.vocab_size}",
            "model": _describe_model(c),
            **_depths_row(config),
            "attention": f"{c.attention} ({setup.attention_reason})",
            "parameters": _describe_parameters(setup)
            + "; each with its sharding in parameters.txt",
            "steps": f"{total_steps} of {format_count(tokens_per_step)} tokens: "
            f"{format_count(total_steps * tokens_per_step)} in all, "
            f"{training_data.epochs(total_steps * batch_size)}",
            **({"memory": kept} if allocator.is_configured else {}),
        },
    )


def log_new_rate(workdir: AnyPath, now: Config, step: int) -> None:
    """Prints by how much the learning rate jumps after `step` of the workdir's run, if it does."""
    if not 0 < step < now.train.total_steps:
        return
    before = stored_config(workdir)
    changed = ", ".join(
        f"{key} was {was!r}, is {is_now!r}"
        for key, (was, is_now) in differing_keys(before, now).items()
        if key.startswith("optimizer.") or key == "train.total_steps"
    )
    if not changed:
        return  # the rates would be compiled, number by number
    old, new = (
        float(learning_rate_schedule(each.optimizer, each.train.total_steps)(jnp.asarray(step)))
        for each in (before, now)
    )
    if isclose(old, new, rel_tol=1e-5):
        return
    way_out = {
        "cosine": "optimizer.schedule=wsd keeps the rate of a run that is made longer",
        "wsd": "to keep it, branch off a checkpoint before the cooldown (train --branch_from)",
    }
    log(
        f"warning: the learning rate of step {step + 1} is {new:.3g}; with the schedule before it "
        f"was {old:.3g} ({changed}); {way_out[now.optimizer.schedule]}"
    )


def _depths_row(config: Config) -> dict[str, str]:
    train = config.train
    if not train.depths:
        return {}
    listed = ", ".join(map(str, train.depths))
    count = f"{train.depths_per_step} of " if len(train.depths) > 1 else ""
    first = full_grid_from(config)
    then = f" up to step {first - 1}, then {config.model.num_steps}" if first else ""
    return {"depths": f"{count}{listed} solver step(s) in each optimizer step{then}"}


def describe_devices(mesh: Mesh) -> str:
    """`8 x cpu, 1 process(es), mesh data 1 x fsdp 8 x tensor 1`, slices, and idle devices."""
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    text = (
        f"{mesh.size} x {kind}, {jax.process_count()} process(es), "
        f"mesh {describe_mesh(dict(mesh.shape))}"
    )
    if devices[0].platform != "cpu" and chip(kind) is None:
        text += "; the peak of this kind isn't known, so the log has no MFU"
    across = axes_across_slices(dict(mesh.shape), devices)
    crossing = " x ".join(f"{axis} {size}" for axis, size in across.items() if size > 1)
    if crossing:
        parts = "nodes" if devices[0].platform == "gpu" else "slices"
        text += f"; {num_slices(devices)} {parts}, crossed by {crossing}"
    if left_out := jax.device_count() - mesh.size:
        text += f"; {left_out} devices idle: the batch size is not divisible by more"
    return text


def _describe_model(c: ModelConfig) -> str:
    source = source_of(c).describe()
    state = "" if c.state_dtype == c.dtype else f", state in {c.state_dtype}"
    block = f" with {c.block}" if c.block else ""
    return (
        f"{c.architecture}{block}, {source}; {c.scheme}, {c.num_steps} steps of "
        f"dt = {c.step_size}; width {c.embed_dim}, {c.num_heads} heads, {c.dtype}{state}"
    )


def write_overview(params: dict, workdir: AnyPath) -> None:
    """Writes `parameters.txt`: each parameter's shape, dtype, size and sharding."""
    if jax.process_index() == 0:
        overview = parameter_overview.get_parameter_overview(params, include_stats="sharding")
        write_whole(workdir / "parameters.txt", f"{overview}\n".encode())


def _describe_parameters(setup: Setup) -> str:
    sizes = {
        name: sum(prod(leaf.shape) for leaf in jax.tree.leaves(part))
        for name, part in setup.abstract_state.params.items()
    }
    trained = {name: size for name, size in sizes.items() if setup.trains(name)}
    frozen = {name: size for name, size in sizes.items() if not setup.trains(name)}
    if not frozen:
        return _format_shares(trained)
    return f"trained {_format_shares(trained)}; frozen {_format_shares(frozen)}"


def _format_shares(sizes: dict[str, int]) -> str:
    shares = [f"{n} {format_count(sizes[n])}" for n in sorted(sizes, key=lambda n: -sizes[n])]
    return f"{format_count(sum(sizes.values()))}: {', '.join(shares)}"


def log_stopped(reason: str, step: int) -> None:
    """Prints that a signal of this name has stopped the run after a step, or before the first."""
    where = f"after step {step}, saved" if step else "before the first step"
    log(f"stopped by {reason} {where}; the same command continues")


def log_summary(workdir: AnyPath, seconds: float) -> None:
    """Prints how the run went, and what to do next."""
    curve = [line["eval/loss"] for line in read_metrics(workdir, "eval/loss")]
    log(
        f"done in {format_duration(seconds)}: validation loss {curve[0]:.4f} -> {curve[-1]:.4f} "
        f"(lowest {min(curve):.4f})"
    )
    log_next_commands(workdir)


def log_next_commands(workdir: AnyPath) -> None:
    """Prints where everything is, and the commands to try next."""
    folder = shlex.quote(str(workdir))
    config = stored_config(workdir)
    trust = " --trust_plugins" if foreign_plugins(config.flat()) else ""
    chat = " --chat" if config.data.loss_on == "completion" else ""
    python = python_command()
    log(
        f"in {workdir}: metrics.jsonl, events/, checkpoints/, tokenizer/, config.json; next:",
        f"  {python} -m t5x_diffeq.evaluate --workdir={folder}{trust}",
        f"  {python} -m t5x_diffeq.generate --workdir={folder}{trust}{chat} --prompt='...'",
        f"  tensorboard --logdir={folder}/events    (pip install tensorboard)",
    )


# ------------------------------------------------------------------------------ in a tracker


def hyperparameters(setup: Setup) -> dict[str, object]:
    """The values that describe a run in a tracker, by flat name; keys by their dotted names."""
    c, params = setup.model.config, jax.tree.leaves(setup.abstract_state.params)
    cost = {}
    if has_method(c, "flops"):
        cost["model/flops_per_token"] = step_flops(c, 1).model / c.max_length
    return {
        **setup.config.flat(),
        **git_state(_ROOT),
        "version/python": platform.python_version(),
        **{f"version/{name}": _version(name) for name in _PACKAGES},
        "devices/kind": setup.mesh.devices.flat[0].device_kind,
        "devices/count": setup.mesh.size,
        "devices/processes": jax.process_count(),
        "devices/mesh": describe_mesh(dict(setup.mesh.shape)),
        "model/parameters": sum(prod(leaf.shape) for leaf in params),
        **cost,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a folder
        return "not installed"


def git_state(root: Path) -> dict[str, str | bool]:
    """`git/commit`, and `git/dirty`: whether tracked files differ; empty if this is no clone."""
    if not (root / ".git").exists():
        return {}
    try:
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        return {"git/commit": _git(root, "rev-parse", "HEAD"), "git/dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):  # no git, not ours, no commit, too slow
        return {}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_SECONDS_FOR_GIT
    )
    return ended.stdout.strip()
