"""Draws figures of results.md and of four lab notes from the tables on these pages.

    PYTHONPATH=. python docs/figures.py

The runs behind these tables are gone, so the tables are what there is to draw. What
`launch/reproduce/` and `studies/` measure anew they draw themselves, by the same function.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from t5x_diffeq.analysis.figures import make_figure, means_with_errors, render_image

DOCS = Path(__file__).parent
Panels = dict[str, dict[str, list[tuple[float | str, float, float | None]]]]
LOSS = "nats per byte"
TICKS: dict[str, list[float]] = {
    "budgets": [],
    "equal_time": [0.5, 1, 2, 5, 10, 20],
    "ladder": [20, 50, 100, 200, 500, 1000, 2000],
}


def rows(page: str, heading: str, table: int = 0) -> tuple[list[str], list[list[str]]]:
    """The head and the other rows of a table below the heading that begins like this."""
    text = (DOCS / page).read_text()
    section = text.partition(f"# {heading}")[2].partition("\n## ")[0]
    lines = re.findall(r"(?:^\|.*\n)+", section, re.M)[table].splitlines()
    head, _, *others = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return head, others


def number(cell: str) -> tuple[float, float | None]:
    """A mean, and its standard error or None."""
    mean, error = re.match(r"([\d.]+)(?: ± ([\d.]+))?", cell).groups()
    return float(mean), error and float(error)


def lines(page: str, heading: str, table: int = 0, labels: int = 1) -> Panels:
    """A line for each row; the first of two labels names the panel."""
    head, others = rows(page, heading, table)
    panels: Panels = {}
    for cells in others:
        title, name = cells[0] if labels > 1 else "", cells[labels - 1].replace("`", "")
        panels.setdefault(title, {})[name] = [
            (float(x), *number(cell))
            for x, cell in zip(head[labels:], cells[labels:], strict=True)
            if cell
        ]
    return panels


def points(heading: str, rows_are_panels: bool = False) -> Panels:
    """A point for each model; a panel for each text, which is a column, or for each row."""
    (_, *heads), others = rows("results.md", heading)
    panels: Panels = {}
    for label, *cells in others:
        for head, cell in zip(heads, cells, strict=True):
            title, model = (label, head) if rows_are_panels else (head, label)
            panels.setdefault(title, {})[model] = [(model, *number(cell))]
    return panels


def tasks(block: str) -> Panels:
    """The accuracies of a block."""
    panels = points("Tables 4 and 5", rows_are_panels=True)
    return {title: each for title, each in panels.items() if block in title and "`" in title}


def costs() -> Panels:
    """Time, and parameters with their moments, of the ODE over the baseline's."""
    (_, *widths), (time, _, state, _) = rows("results.md", "Figures 15 and 16")
    return {
        f"{name} / baseline": {
            "ODE": [(float(T), float(x), None) for T, x in zip(widths, cells, strict=True)]
        }
        for name, *cells in (time, state)
    }


def budgets() -> Panels:
    """Loss against seconds of the optimizer steps."""
    panel: dict = {}
    for model, _, _, loss, seconds in rows("lab/budgets.md", "Equal steps")[1]:
        panel.setdefault(model, []).append((float(seconds), *number(loss)))
    return {"": {model: sorted(line) for model, line in panel.items()}}


def equal_time() -> Panels:
    """Loss against parameters; a panel for each text."""
    head, others = rows("lab/equal_time.md", "Equal time")
    panels: Panels = {}
    for name, _, parameters, _, *losses in others:
        for text, loss in zip(head[4:], losses, strict=True):
            if loss:
                point = (float(parameters.removesuffix("M")), *number(loss))
                panels.setdefault(text, {})[name.replace("`", "")] = [point]
    return panels


def ladder() -> Panels:
    """Loss against parameters; a line for each model, a point for each size."""
    panel: dict = {}
    for model, *sizes in rows("lab/ladder.md", "A ladder of sizes")[1]:
        panel[model.replace("`", "")] = [
            (float(parameters.removesuffix("k")), *number(loss))
            for parameters, loss in zip(sizes[::2], sizes[1::2], strict=True)
            if loss
        ]
    return {"": panel}


def structure_leads() -> Panels:
    """Nats per byte ahead of GPT, in brackets in the cells; a panel for each budget."""
    panels: Panels = {}
    for width in (32, 48):
        (_, _, _, _, *budgets), others = rows("lab/structures.md", f"Width {width}")
        for name, _, _, _, *cells in others:
            for budget, cell in zip(budgets, cells, strict=True):
                lead = re.search(r"\((-?[\d.]+) ± ([\d.]+)\)", cell)
                if lead:
                    point = (name.replace("`", ""), float(lead[1]), float(lead[2]))
                    panels.setdefault(budget, {}).setdefault(f"width {width}", []).append(point)
    return panels


def draw_leads(panels: Panels) -> Figure:
    """A row for each structure, a column for each budget, and two standard errors as whiskers."""
    figure = make_figure(4.6)
    axes_of = figure.subplots(1, len(panels), sharey=True)
    points = [point for panel in panels.values() for line in panel.values() for point in line]
    names = list(dict.fromkeys(name for name, *_ in points))
    for axes, (budget, lines_of) in zip(axes_of, panels.items(), strict=True):
        for i, (width, line) in enumerate(lines_of.items()):
            y = [names.index(name) + 0.24 * (i - 0.5) for name, *_ in line]
            axes.errorbar(
                [lead for _, lead, _ in line],
                y,
                xerr=[2 * error for *_, error in line],
                fmt="os"[i],
                markersize=3.5,
                linewidth=1,
                color=("#0072b2", "#d55e00")[i],
                label=width,
            )
        axes.axvline(0, color="#4d4d4d", linewidth=0.8)
        axes.set_title(budget, fontsize=8)
        axes.set_xlabel("nats per byte ahead of GPT")
    axes_of[0].set_yticks(range(len(names)), names)
    axes_of[0].invert_yaxis()
    figure.legend(*axes_of[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def figures() -> Iterator[tuple[str, Panels, str, str]]:
    """The name of each figure, its panels and the labels of its axes."""
    losses = "Tables 1 and 2"
    yield "table1", points(losses), "", LOSS
    yield "table1_rates", lines("results.md", losses, 1, labels=2), "learning rate", LOSS
    yield "figure14", lines("results.md", "Figure 14"), "T", LOSS
    yield "figure18", lines("results.md", "Figure 18"), "T", LOSS
    yield "figure7", lines("results.md", "Figure 7"), "beta2", LOSS
    yield "table4", tasks("GPT"), "", "accuracy"
    yield "table5", tasks("Llama"), "", "accuracy"
    yield "figure15", costs(), "T", "ratio"
    tuned = lines("results.md", "Figure 5", labels=2)
    yield "figure5", tuned, "solver steps", "perplexity per byte"
    yield "equal_time", equal_time(), "million parameters", LOSS
    yield "budgets", budgets(), "seconds", LOSS
    yield "ladder", ladder(), "thousand parameters", LOSS


def save(name: str, figure: Figure) -> None:
    """Writes the figure as PNG and PDF."""
    for kind in ("png", "pdf"):
        (DOCS / "images" / f"{name}.{kind}").write_bytes(render_image(figure, kind))


if __name__ == "__main__":
    for name, panels, across, up in figures():
        every = [point for each in panels.values() for line in each.values() for point in line]
        ticks = sorted({x for x, *_ in every if not isinstance(x, str)})
        ticks = TICKS.get(name, ticks)
        figure = means_with_errors(
            {title.replace("`", ""): each for title, each in panels.items()},
            across,
            up,
            log=across in ("learning rate", "million parameters", "thousand parameters"),
            ticks=ticks,
        )
        save(name, figure)
    save("structures", draw_leads(structure_leads()))
