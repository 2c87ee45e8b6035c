"""The report's section on integration in parallel over depth."""

import numpy as np

from t5x_diffeq.analysis import plots
from t5x_diffeq.analysis.depth_parallel import DepthParallel
from t5x_diffeq.analysis.plots import make_drawing
from t5x_diffeq.analysis.report import Row, Section, Table

CLOSE = 0.01  # nats per token by which a loss may differ from the serial pass's
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


def depth_parallel_section(found: DepthParallel) -> Section:
    """The section on parareal in place of the serial pass."""
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
    needed = int(np.argmax(np.abs(apart) <= CLOSE))
    return Section(
        name="parallel",
        title="Parallel in depth",
        findings=[_finding(found, needed)],
        method=_METHOD,
        tables=[Table(f"N = {found.num_steps} steps in S = {found.slices} slices", _COLUMNS, rows)],
        drawings={"errors": make_drawing(plots.errors_by_iteration(curves), caption)},
        arrays={
            "residuals": (found.residuals, "[iterate], relative"),
            "state_errors": (found.state_errors, "[iterate], of y(1), relative"),
            "losses": (found.losses, "[iterate], nats per token"),
            "gradient_errors": (found.gradient_errors, "[iterate], relative"),
        },
        numbers={
            "parallel/iterations": needed,
            "parallel/speed": found.num_steps / found.in_sequence[needed],
        },
    )


def _finding(found: DepthParallel, needed: int) -> str:
    steps = found.in_sequence[needed]
    verdict = "pays" if steps < found.num_steps else "does not pay"
    return (
        f"After {needed} of {found.slices} iterations the loss is within {CLOSE:g} nats of the "
        f"serial pass's, {found.serial_loss:.4f}: {steps} steps in sequence instead of "
        f"{found.num_steps}. Here it {verdict}."
    )
