"""A self-contained page, and the arrays and figures beside it."""

import base64
import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from t5x_diffeq.runtime.files import AnyPath, digest, write_whole

Row = Sequence[str | float | int]

_STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       margin: 0 auto; padding: 1rem; max-width: 60rem }
h1 { font-size: 1.5rem }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc }
figure { margin: 1.2rem 0 } figure img { width: 100%; height: auto }
sub, sup { font-size: .75em; line-height: 0 }
figcaption, .how { color: #555; font-size: .9rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; margin: .8rem 0 }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
td { white-space: nowrap }
th:first-child, td:first-child { text-align: left }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1rem }
dd { margin: 0; overflow-wrap: anywhere }
.prompt { font-family: ui-monospace, monospace; line-height: 1.9; overflow-wrap: anywhere }
.prompt span { white-space: pre-wrap; padding: .15em 0 }
.prompt .output { outline: 1.5px solid #2c3e50 }
@media (max-width: 40rem) { dl { display: block } dt { color: #555; margin-top: .5rem } }
"""


@dataclass(frozen=True)
class Table:
    """A titled table; floats are shown with three digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Drawing:
    """A figure as a PNG and as a PDF, with its caption."""

    caption: str
    png: bytes
    pdf: bytes


@dataclass(frozen=True)
class Section:
    """One analysis.

    Attributes:
      name: stem of its files' names.
      title: title of the section.
      findings: what was found, in one or a few sentences: paragraphs of plain text.
      method: how it was computed: paragraphs of plain text.
      tables: tables of numbers.
      drawings: figures by name.
      arrays: results by name: the array, with its axes and unit in words.
      markup: additional HTML, shown before the figures.
      numbers: its main results by name, which `analyze` prints.
    """

    name: str
    title: str
    findings: Sequence[str]
    method: Sequence[str]
    tables: Sequence[Table]
    drawings: dict[str, Drawing]
    arrays: dict[str, tuple[np.ndarray, str]]
    markup: str = field(default="")
    numbers: dict[str, float] = field(default_factory=dict)


def write_report(
    folder: AnyPath, page: str, title: str, facts: dict[str, object], sections: Sequence[Section]
) -> AnyPath:
    """Writes the page, and for each section its arrays, its figures and its manifest.

    Args:
      folder: folder to write to.
      page: name of the page's file.
      title: title of the page.
      facts: what was analysed; shown at the top and in each manifest.
      sections: sections of the page.

    Raises:
      RunError: if a file can't be written.
    """
    for section in sections:
        _write_section(folder, section, facts)
    write_whole(folder / page, _page_markup(title, facts, sections).encode())
    return folder / page


def _write_section(folder: AnyPath, section: Section, facts: dict[str, object]) -> None:
    """Writes `NAME.npz`, `NAME.json` (its manifest), and `NAME_FIGURE.png` and `.pdf`."""
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


def _page_markup(title: str, facts: dict[str, object], sections: Sequence[Section]) -> str:
    about = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>"
        for key, value in facts.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<dl>{about}</dl>{''.join(map(_section_markup, sections))}</body></html>"
    )


def _section_markup(section: Section) -> str:
    """A section in HTML: how it was computed, numbers, figures, links."""
    found = "".join(f"<p>{typeset(text)}</p>" for text in section.findings)
    how = "".join(f'<p class="how">{typeset(text)}</p>' for text in section.method)
    figures = "".join(
        f'<figure><div class="wide">{_embed_picture(drawing)}</div><figcaption>'
        f"{typeset(drawing.caption)} "
        f'<a href="{section.name}_{name}.pdf">PDF</a></figcaption></figure>'
        for name, drawing in section.drawings.items()
    )
    links = (
        f'<p>Arrays: <a href="{section.name}.npz">{section.name}.npz</a>, described in '
        f'<a href="{section.name}.json">{section.name}.json</a>.</p>'
    )
    tables = "".join(map(table_markup, section.tables))
    return (
        f'<section id="{section.name}"><h2>{html.escape(section.title)}</h2>'
        f"{found}{how}{section.markup}{tables}{figures}{links}</section>"
    )


def typeset(text: str) -> str:
    """The text in HTML, with `W_Q W_K^T` and the like typeset as in the figures."""
    text = re.sub(r"\b([A-Za-z])_([A-Za-z0-9]+)", r"<i>\1</i><sub>\2</sub>", html.escape(text))
    text = re.sub(r"\b([A-Za-z])\^([A-Za-z0-9]+)", r"<i>\1</i><sup>\2</sup>", text)
    return re.sub(r"</sub>\^([A-Za-z0-9]+)", r"</sub><sup>\1</sup>", text)


def _embed_picture(drawing: Drawing) -> str:
    data = base64.b64encode(drawing.png).decode()
    return f'<img alt="{html.escape(drawing.caption)}" src="data:image/png;base64,{data}">'


def table_markup(table: Table) -> str:
    """A table in HTML, which scrolls by itself if the page is narrow."""
    head = "".join(f"<th>{typeset(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{typeset(_format_cell(cell))}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    title = f'<p class="how">{typeset(table.title)}.</p>'
    return f'{title}<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _format_cell(cell: str | float | int) -> str:
    """A table cell's text, with at most three digits of a float."""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def prompt_markup(
    title: str,
    pieces: Sequence[str],
    shades: Float[np.ndarray, " L"],
    values: Sequence[str],
    output: int,
) -> str:
    """The prompt as text with tokens shaded from 0 to 1; hovering shows a token's value (figure 3).

    Args:
      title: title above the prompt.
      pieces: the tokens' text.
      shades: shade of each token.
      values: value of each token, as text.
      output: the token whose sensitivity is shown, which is outlined.
    """
    spans = "".join(
        f'<span{" class=output" if k == output else ""} title="{html.escape(value)}" '
        f'style="background:rgba(230,81,0,{0.75 * float(shade):.2f})">{html.escape(piece)}</span>'
        for k, (piece, shade, value) in enumerate(zip(pieces, shades, values, strict=True))
    )
    return f'<p class="how">{html.escape(title)}</p><p class="prompt">{spans}</p>'
