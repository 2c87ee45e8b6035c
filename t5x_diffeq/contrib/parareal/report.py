"""The page on parareal in place of a run's serial pass."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from t5x_diffeq.analysis.figures import make_drawing, make_figure
from t5x_diffeq.analysis.report import Row, Section, Table, write_report
from t5x_diffeq.contrib.parareal.comparison import (
    Comparison,
    PerIterate,
    best_slices,
    compare_with_serial,
)
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.runs.load import load_run
from t5x_diffeq.runtime.console import Progress
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.verbs.analyze import facts_of, facts_today

_TOKENS = 256  # of the validation text, at most
_CLOSE = 0.01  # nats per token by which a loss may differ from the serial pass's
_METHOD = (
    "Parareal (Lions, Maday and Turinici 2001): depth is cut into S slices. A coarse solver "
    "crosses each in one step of the same scheme, with W(t) at that grid's nodes. Each iteration "
    "solves all slices at once by the fine steps, and then corrects the coarse pass, serially. S "
    "iterations are the serial pass. The gradient of an iterate is that of its own computation.",
    "In sequence are S coarse steps, and for each iteration N / S fine and S coarse ones. The "
    "speed is N over their number, on S times the devices, if a coarse step takes as long as a "
    "fine one and communication takes no time.",
)
_COLUMNS = (
    "iterations",
    "steps in sequence",
    "speed",
    "residual",
    "error of y(1)",
    "loss - serial loss",
    "error of the gradient",
)


def write(
    workdir: AnyPath,
    folder: AnyPath,
    slices: int | None,
    num_steps: int | None,
    checkpoint: int | str | None,
) -> None:
    """Writes the page, prints its main numbers and its path.

    Args:
      workdir: the run's workdir.
      folder: the folder to write to.
      slices: S; None for that with which one iteration has the fewest steps in sequence.
      num_steps: the number of solver steps; None for the trained one.
      checkpoint: step of the checkpoint, or "best"; None for the newest.

    Raises:
      InputError: if the workdir holds no such run, or parareal can't integrate its model.
    """
    corpus = load_corpus(workdir)
    run = load_run(
        workdir,
        corpus.tokenizer.vocab_size,
        batch_size=1,
        checkpoint=checkpoint,
        grids=[(num_steps, None)],
    ).at_depth(num_steps)
    params = jax.tree.map(jnp.asarray, jax.device_get(run.params))  # off the mesh
    model = run.placed.model
    limit = min(model.config.max_length, _TOKENS) + 1
    validation = corpus.parts[0].validation
    documents = [np.asarray(validation[n]) for n in range(min(len(validation), limit))]
    tokens = jnp.asarray(np.concatenate(documents)[None, :limit], jnp.int32)
    slices = slices or best_slices(model.config.num_steps)
    with Progress("parallel in depth"):
        section = _section(compare_with_serial(model, params, tokens, slices))
    print(json.dumps(section.numbers))
    facts = facts_of(workdir, run) | facts_today()
    print(write_report(folder, "parareal.html", "Parareal", facts, [section]), flush=True)


def _section(found: Comparison) -> Section:
    curves = {
        "residual": found.residuals,
        "y(1)": found.state_errors,
        "gradient": found.gradient_errors,
    }
    apart = found.losses - found.serial_loss
    measured = (found.residuals, found.state_errors, apart, found.gradient_errors)
    rows: list[Row] = [
        (str(n), str(steps), found.num_steps / steps, *(float(of[n]) for of in measured))
        for n, steps in enumerate(found.in_sequence)
    ]
    caption = "Relative errors against the serial pass; 0 iterations are the coarse pass alone."
    needed = int(np.argmax(np.abs(apart) <= _CLOSE))
    return Section(
        name="parareal",
        title="Parallel in depth",
        conclusion=_finding(found, needed),
        advice="Compare other numbers of slices (`--slices`), and a run of more solver steps, for "
        "which a coarse step is a better guess.",
        method=_METHOD,
        tables=[Table(f"N = {found.num_steps} steps in S = {found.slices} slices", _COLUMNS, rows)],
        drawings={"errors": make_drawing(partial(_errors_by_iteration, curves), caption)},
        arrays={
            "residuals": (found.residuals, "[iterate], relative"),
            "state_errors": (found.state_errors, "[iterate], of y(1), relative"),
            "losses": (found.losses, "[iterate], nats per token"),
            "gradient_errors": (found.gradient_errors, "[iterate], relative"),
        },
        numbers={
            "parareal/iterations": needed,
            "parareal/speed": found.num_steps / found.in_sequence[needed],
        },
    )


def _finding(found: Comparison, needed: int) -> str:
    steps = found.in_sequence[needed]
    verdict = "pays" if steps < found.num_steps else "does not pay"
    return (
        f"After {needed} of {found.slices} iterations the loss is within {_CLOSE:g} nats of the "
        f"serial pass's, {found.serial_loss:.4f}: {steps} steps in sequence instead of "
        f"{found.num_steps}. Here it {verdict}."
    )


def _errors_by_iteration(curves: dict[str, PerIterate], width: float) -> Figure:
    """Relative errors against the number of iterations, on a logarithmic axis."""
    figure = make_figure(2.4, width)
    ax = figure.subplots()
    for label, curve in curves.items():
        shown = np.where(curve > 0, curve, np.nan)
        ax.plot(range(len(curve)), shown, "o-", markersize=3, label=label)
    ax.set(xlabel="iterations", ylabel="relative error", yscale="log")
    ax.set_xticks(range(max(map(len, curves.values()))))
    ax.legend()
    return figure
