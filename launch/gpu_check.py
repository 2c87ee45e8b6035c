"""Checks and times this machine's GPU; see launch/gpu_check.sh.

Each part is a process of its own, which has the GPU to itself; the others run even if it fails.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import truediv
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from t5x_diffeq.config.config import Config
    from t5x_diffeq.planner.comparison import Candidate

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]  # the latter has the recorded arrays


class Row(NamedTuple):
    """A line of the table."""

    what: str
    value: str
    fine: bool | None = None  # None: a measurement


# ---------------------------------------------------------------------------------- is it right?


def check_kernels(small: bool) -> Iterator[Row]:
    """Compares the platform's attention in bfloat16, and its gradients, with XLA's in float32."""
    import jax
    import jax.numpy as jnp

    from t5x_diffeq.model.layers.attention_kernels import causal_attention, choose

    device, length = jax.devices()[0], 128 if small else 1024
    capability = getattr(device, "compute_capability", None)
    for width, heads, groups, documents in ((64, 8, 8, 1), (128, 8, 2, 1), (64, 8, 2, 4)):
        shapes = ((2, length, heads, width), *[(2, length, groups, width)] * 2)
        keys = jax.random.split(jax.random.key(width), 3)
        exact = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
        rounded = [x.astype(jnp.bfloat16) for x in exact]
        numbers = jnp.repeat(jnp.arange(documents, dtype=jnp.int32), length // documents)
        segments = numbers[None].repeat(2, 0) if documents > 1 else None
        shape = (jnp.bfloat16, width, length, documents > 1)
        kernel, _ = choose(device.platform, *shape, capability=capability)

        def run(kernel: str, segments: jax.Array | None, *qkv: jax.Array) -> tuple:
            def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
                mixed = causal_attention(q, k, v, kernel, segments).astype(jnp.float32)
                return jnp.sin(mixed).sum(), mixed

            gradients, mixed = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*qkv)
            return mixed, *gradients

        computed = jax.jit(partial(run, kernel, segments))(*rounded)
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(partial(run, "xla", segments))(*(x.astype(float) for x in rounded))
        errors = [
            float(jnp.abs(a.astype(float) - b).max() / jnp.abs(b).max())
            for a, b in zip(computed, wanted, strict=True)
        ]
        what = f"{kernel}, width {width}, {heads} heads on {groups}, {documents} documents a row"
        text = f"largest error {max(errors):.1e} of the largest entry (limit 2e-2)"
        yield Row(what, text, max(errors) < 2e-2)


def check_recorded_arrays(small: bool) -> Iterator[Row]:
    """Compares logits with the official implementation's, recorded in tests/support/golden."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from small_models import GPT_ODE, gpt_params, load

    from t5x_diffeq.model.language_model import LanguageModel

    arrays = load("gpt_ode.npz")
    tokens = jnp.asarray(arrays["input/tokens"], jnp.int32)
    params = {"params": gpt_params(arrays, "param")}
    for num_steps in (3, 6, 12):
        model = LanguageModel(dataclasses.replace(GPT_ODE, num_steps=num_steps))
        with jax.default_matmul_precision("highest"):
            logits = np.asarray(jax.jit(model.apply)(params, tokens))[..., :97]
        error = float(np.abs(logits - arrays[f"evaluate_at/logits_{num_steps}"]).max())
        text = f"error {error:.1e} (limit 1e-4)"
        yield Row(f"recorded logits, {num_steps} steps", text, error < 1e-4)


def check_resume(small: bool) -> Iterator[Row]:
    """Stops a training with SIGTERM after some 25 steps, resumes it, and stops it again."""
    from process_runs import SMALL_MODEL

    place = tempfile.TemporaryDirectory(prefix="gpu_check-")  # deleted when this function ends
    folder = Path(place.name)
    text = folder / "text.txt"
    text.write_text("".join(f"{n} and {n * n} are a number and its square\n" for n in range(3000)))
    command = [
        *(sys.executable, "-m", "t5x_diffeq.train", "--config=configs/tiny.py"),
        *(f"--workdir={folder / 'run'}", f"--config.data.path={text}"),
        *("--config.data.source=text_files", "--config.data.tokenizer=bytes"),
        *("--config.train.total_steps=50000", "--config.train.log_every=1"),
        *("--config.train.eval_batches=2", "--config.model.dtype=bfloat16"),
        *(SMALL_MODEL if small else ()),
    ]
    statuses, log = [], ""
    for _ in range(2):
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as training:
            reports = 0
            for line in training.stderr or ():
                log += line
                reports += line.startswith("step ")
                if reports == 25:
                    training.send_signal(signal.SIGTERM)
            statuses.append(training.wait())
    from t5x_diffeq.training.tracking.jsonl import read_metrics

    lines = [line for line in read_metrics(folder / "run") if "train/loss" in line]
    fine = statuses == [42, 42] and len(lines) >= 50
    fine = fine and [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    losses = [line["train/loss"] for line in lines]
    result = f"loss {losses[0]:.3f} to {losses[-1]:.3f}" if fine else log[-2000:]
    yield Row(f"{len(lines)} steps, stopped and resumed", result, fine)


# -------------------------------------------------------------------------------- how fast is it?


def config_to_time(small: bool):
    """Llama-1B at full width, with the widest time embedding that leaves room for both models."""
    import jax

    from configs import llama1b
    from t5x_diffeq.config.config import Config
    from t5x_diffeq.training.setup import expected_vocab_size, least_memory, make_setup

    config = llama1b.get_config("ode")
    config.model.remat = "keep:qkv,attention,mlp"
    config.data.cross_documents = True  # one document a row, as in the estimates of `plan`
    config.train.batch_size = 8
    if small:
        config.model.update(embed_dim=64, mlp_dim=128, num_heads=2, num_steps=2, time_embed_dim=8)
        config.data.sequence_length = 128
        return Config.of(config)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    for width in (24, 12, 6, 3):
        config.model.time_embed_dim = width
        setup = make_setup(Config.of(config), expected_vocab_size(Config.of(config)))
        if 2 * least_memory(setup) < limit:
            break
    return Config.of(config)


def time_steps(small: bool) -> Iterator[Row]:
    """Llama-1B's block, ODE and baseline in turns."""
    import jax

    from t5x_diffeq.config.config_files import baseline_of
    from t5x_diffeq.planner.planning import plan_step
    from t5x_diffeq.planner.topology import TARGETS, Topology
    from t5x_diffeq.system.chips import GIB, chip

    device, config = jax.devices()[0], config_to_time(small)
    figures = chip(device.device_kind)
    kind = device.device_kind if device.device_kind in TARGETS else "cpu"
    where = Topology(f"{kind}:1", 1, [device], kind, "cpu" if kind == "cpu" else "cuda")
    candidates = take_turns({"ODE": config, "baseline": baseline_of(config)})
    medians = {name: statistics.median(c.seconds) for name, c in candidates.items()}
    tokens = config.train.batch_size * config.data.sequence_length
    c = config.model
    for name, seconds in medians.items():
        plan = plan_step(candidates[name].setup, config.train.batch_size, where)
        text = f"{1e3 * seconds:.1f} ms, {tokens / seconds:,.0f} tokens/s"
        if figures:
            text += f", MFU {plan.flops.model / seconds / figures.peak_flops:.1%}"
        text += f", {plan.memory.needed / GIB:.2f} GiB"
        if plan.times:
            low, high = 1e3 * plan.times.low, 1e3 * plan.times.high
            text += f" (`plan` says {low:.1f} to {high:.1f} ms)"
        yield Row(f"{name}, {c.num_steps} steps, width {c.embed_dim}, {tokens} tokens", text)
    yield Row(
        f"ODE / baseline, T = {c.time_embed_dim}", f"{medians['ODE'] / medians['baseline']:.3f}"
    )


def time_gpt_small(small: bool) -> Iterator[Row]:
    """GPT-small's models in turns, 32 sequences of 1024; on a CPU two of them, 4 of 128."""
    from configs import gpt_small
    from t5x_diffeq.config.config import Config

    rows = 4 if small else 32
    keys = {"model.remat": "keep:qkv,attention,mlp", "model.vocab_size": 50304}
    keys |= {"data.tokenizer": "bytes", "data.cross_documents": True, "train.batch_size": rows}
    if small:
        keys |= {"model.embed_dim": 64, "model.mlp_dim": 128, "model.num_heads": 2}
        keys |= {"model.vocab_size": 512, "data.sequence_length": 128}
    variants = ("baseline", "ode", *(() if small else ("compact", "smooth", "shared")))
    models = {v: Config.of(gpt_small.get_config(v)).with_values(keys) for v in variants}
    candidates = take_turns(models)
    tokens = rows * models["ode"].data.sequence_length
    for name, candidate in candidates.items():
        seconds = statistics.median(candidate.seconds)
        ratios = map(truediv, candidate.seconds, candidates["baseline"].seconds)
        text = f"{1e3 * seconds:.1f} ms, {tokens / seconds:,.0f} tokens/s"
        if name != "baseline":
            text += f", {statistics.median(ratios):.3f} of the baseline's time"
        yield Row(f"GPT-small, {name}, {tokens} tokens", text)


def take_turns(models: "dict[str, Config]") -> "dict[str, Candidate]":
    """Times the models' steps in turns; `seconds` has the times of the steps after the warm-up."""
    from t5x_diffeq.planner.comparison import Candidate

    candidates = {name: Candidate(name, config) for name, config in models.items()}
    for round in range(_WARM_UP + _TIMED):
        for candidate in candidates.values():
            candidate.step()
            if round < _WARM_UP:
                candidate.seconds.clear()
    return candidates


_WARM_UP, _TIMED = 2, 10  # steps of each model


def time_generation(small: bool) -> Iterator[Row]:
    """Tokens of one sequence per second, with the cache."""
    from studies.generation import generation_rates
    from t5x_diffeq.training.setup import expected_vocab_size, make_setup

    config = config_to_time(small)
    model = make_setup(config, expected_vocab_size(config)).model
    rates = generation_rates(model, rounds=20)
    text = (
        f"{rates['cached']:.1f} tokens/s, {rates['cached'] / rates['reread']:.1f} times rereading"
    )
    yield Row("generation, one sequence", text)


# -------------------------------------------------------------------------------------- the table


def name_machine(small: bool) -> Iterator[Row]:
    """The device, and JAX's version."""
    import jax

    device = jax.devices()[0]
    yield Row("device", f"{device.device_kind}, jax {jax.__version__}")


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "machine": name_machine,
    "kernels": check_kernels,
    "recorded arrays": check_recorded_arrays,
    "training and resuming": check_resume,
    "steps": time_steps,
    "GPT-small": time_gpt_small,
    "generation": time_generation,
}


def run_part(name: str, small: bool, seconds: float) -> list[Row]:
    """The rows of a part, up to a failure."""
    command = [sys.executable, __file__, f"--part={name}", *(["--small"] if small else [])]
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
        out, why = ended.stdout, ended.stderr.strip()[-600:] if ended.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, why = (error.stdout or b"").decode(), f"not done in {seconds:.0f} s"
    rows = [Row(*json.loads(line)) for line in out.splitlines() if line.startswith("[")]
    return [*rows, Row(name, why, False)] if why else rows


def main() -> int:
    """Prints the table; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="of all parts together")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.md"), help="the table")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        for row in PARTS[options.part](options.small):
            print(json.dumps(row), flush=True)
        return 0
    if not options.minutes > 0:
        parser.error(f"--minutes={options.minutes:g} must be more than 0")
    if options.output.is_dir() or not options.output.parent.is_dir():
        parser.error(f"--output={options.output} must be a file in a folder that is there")
    until = time.monotonic() + 60 * options.minutes
    rows = []
    for name in PARTS:
        rows += run_part(name, options.small, until - time.monotonic())
        table = ["| | | |", "|---|---|---|"]
        marks = {True: "right", False: "**wrong**", None: ""}
        for row in rows:
            value = " ".join(row.value.split()).replace("|", "/")
            table.append(f"| {row.what} | {value} | {marks[row.fine]} |")
        options.output.write_text("\n".join(table) + "\n")  # after each part: nothing is lost
    print(options.output.read_text(), end="")
    return int(any(row.fine is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
