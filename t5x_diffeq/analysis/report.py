"""A self-contained page, and the arrays and figures beside it."""

import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float

from t5x_diffeq.system.files import AnyPath, digest, write_whole

Row = Sequence[str | float | int]
RETURN = "\u21b5"  # shows the end of a line
_STYLE = Path(__file__).with_suffix(".css")


@dataclass(frozen=True)
class DataTable:
    """A titled table; floats are shown with three digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Drawing:
    """A figure and its caption, which describes it."""

    caption: str
    png: bytes
    pdf: bytes
    # the figure for a page and for a narrow screen, as SVG elements whose text and axes have the
    # page's colour; none if the page shows it by other means
    svgs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """One analysis; all texts are plain text, see `typeset`."""

    name: str  # stem of its files' names
    title: str
    method: Sequence[str]  # how it was computed: paragraphs
    tables: Sequence[DataTable]
    drawings: dict[str, Drawing]
    # results by name: the array, with its axes and unit in words
    arrays: dict[str, tuple[np.ndarray, str]]
    findings: Sequence[str] = ()  # numbers that no table or figure has: paragraphs
    markup: str = ""  # additional HTML, shown before the figures
    # its main results by name, which `analyze` prints
    numbers: dict[str, float] = field(default_factory=dict)


def write_report(
    folder: AnyPath,
    page: str,
    title: str,
    facts: dict[str, object],
    sections: Sequence[Analysis],
    missing: Sequence[str] = (),
) -> AnyPath:
    """Writes a page with these sections, which lists the `missing` ones as not done yet.

    Raises:
      RunError: if the file can't be written.
    """
    write_whole(folder / page, _page_markup(title, facts, sections, missing).encode())
    return folder / page


def write_section(folder: AnyPath, section: Analysis, facts: dict[str, object]) -> None:
    """Writes `NAME.npz`, `NAME.json` (its manifest), and `NAME_FIGURE.png` and `.pdf`.

    Raises:
      RunError: if a file can't be written.
    """
    content = io.BytesIO()
    named = {name: array for name, (array, _) in section.arrays.items()}
    np.savez_compressed(content, **named)  # type: ignore[arg-type]  # none is `allow_pickle`
    arrays = {
        name: {"shape": list(array.shape), "dtype": str(array.dtype), "meaning": meaning}
        for name, (array, meaning) in section.arrays.items()
    }
    manifest = {
        "file": f"{section.name}.npz",
        "sha256": digest([content.getvalue()]),
        "of": facts,
        "found": list(section.findings),
        "how": list(section.method),
        "arrays": arrays,
    }
    write_whole(folder / f"{section.name}.npz", content.getvalue())
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    write_whole(folder / f"{section.name}.json", text.encode())
    for name, drawing in section.drawings.items():
        write_whole(folder / f"{section.name}_{name}.png", drawing.png)
        write_whole(folder / f"{section.name}_{name}.pdf", drawing.pdf)


def _page_markup(
    title: str, facts: dict[str, object], sections: Sequence[Analysis], missing: Sequence[str]
) -> str:
    about = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>"
        for key, value in facts.items()
    )
    contents = "".join(
        f'<li><a href="#{each.name}">{html.escape(each.title)}</a></li>' for each in sections
    )
    undone = "".join(f"<li>{html.escape(each)}: not done yet</li>" for each in missing)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE.read_text('utf-8')}</style></head>"
        '<body><header><p class="over">Neural ODE transformer</p>'
        f"<h1>{html.escape(title)}</h1><dl>{about}</dl></header>"
        f'<nav aria-label="Contents"><p class="over">Contents</p><ul>{contents}{undone}</ul></nav>'
        f"<main>{''.join(map(_section_markup, sections))}</main></body></html>"
    )


def _section_markup(section: Analysis) -> str:
    findings = "".join(f"<p>{typeset(text)}</p>" for text in section.findings)
    how = "".join(f'<p class="small">{typeset(text)}</p>' for text in section.method)
    figures = "".join(
        f"<figure>{_show(drawing)}<figcaption>{typeset(drawing.caption)} "
        f'<a href="{section.name}_{name}.pdf">PDF</a></figcaption></figure>'
        for name, drawing in section.drawings.items()
        if drawing.svgs
    )
    files = "".join(
        f' <a href="{section.name}_{name}.pdf">{typeset(drawing.caption)} PDF</a>'
        for name, drawing in section.drawings.items()
        if not drawing.svgs
    )
    links = (
        f'<p class="small">Arrays: <a href="{section.name}.npz">{section.name}.npz</a>, described '
        f'in <a href="{section.name}.json">{section.name}.json</a>.{files}</p>'
    )
    tables = "".join(map(table_markup, section.tables))
    return (
        f'<section id="{section.name}"><h2>{html.escape(section.title)}</h2>'
        f"{findings}{section.markup}{figures}{tables}<h3>Method</h3>{how}{links}</section>"
    )


def as_code(text: str) -> str:
    """A text, such as a token's, on one line and in backticks: `typeset` leaves it as it is."""
    for mark, shown in (("\n", RETURN), ("\t", "\u2192"), ("`", "\u02cb")):
        text = text.replace(mark, shown)
    return f"`{text}`"


def typeset(text: str) -> str:
    """The text in HTML: W_Q W_K^T, lambda and the like as in the figures, `this` as code."""
    parts = html.escape(text).split("`")
    parts[::2] = map(_typeset_symbols, parts[::2])
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return "".join(parts)


def _typeset_symbols(text: str) -> str:
    text = re.sub(r"\b([A-Za-z])_([A-Za-z0-9]+)", r"<i>\1</i><sub>\2</sub>", text)
    text = re.sub(r"\b([A-Za-z])\^([A-Za-z0-9]+)", r"<i>\1</i><sup>\2</sup>", text)
    text = re.sub(r"\blambda\b", "<i>&lambda;</i>", text)
    return re.sub(r"(?<=[>\d])\^([A-Za-z0-9]+)", r"<sup>\1</sup>", text)


def _show(drawing: Drawing) -> str:
    """The drawing's two SVGs; the page's style shows the SVG that fits the screen."""
    label = f'role="img" aria-label="{html.escape(drawing.caption)}"'
    return "".join(
        svg.replace("<svg", f'<svg class="chart {width}" {label}', 1)
        for svg, width in zip(drawing.svgs, ("broad", "narrow"), strict=True)
    )


def table_markup(table: DataTable) -> str:
    """A table in HTML, which scrolls by itself if the page is narrow."""
    head = "".join(f"<th>{typeset(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{typeset(_format_cell(cell))}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="wide"><table><caption>{typeset(table.title)}.</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _format_cell(cell: str | float | int) -> str:
    """A table cell's text, with at most three digits of a float."""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def prompt_markup(
    title: str,
    pieces: Sequence[str],
    shades: Float[np.ndarray, " others"],
    values: Float[np.ndarray, " L"],
) -> str:
    """The prompt as text with tokens shaded from 0 to 1; hovering shows a token's value (figure 3).

    The last token, whose output is looked at, is outlined instead of shaded.

    Args:
      title: what the shade means.
      shades: shade of each token but the last.
    """
    shown = np.append(0.75 * shades, 0)
    spans = "".join(
        f'<span{" class=output" if k == len(pieces) - 1 else ""} title="token {k}: {value:.3g}" '
        f'style="background:rgba(230,81,0,{shade:.2f})">'
        f"{html.escape(piece.replace(chr(10), RETURN + chr(10)))}</span>"
        for k, (piece, shade, value) in enumerate(zip(pieces, shown, values, strict=True))
    )
    others = values[:-1]
    scale = (
        f"{np.nanmin(others):.3g}<i class=scale></i>{np.nanmax(others):.3g}" if len(others) else ""
    )
    return f'<h3>{html.escape(title)}</h3><p class="small">{scale}</p><p class="prompt">{spans}</p>'
