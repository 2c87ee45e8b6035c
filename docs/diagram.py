"""Draws docs/images/idea.svg: t -> e(t) -> W(t) -> solver.

    python docs/diagram.py

Boxes bring their own light background and the arrows are grey, so the picture reads on light and on
dark pages alike. Standard library only.
"""

from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 286
INK, GREY = "#1f2933", "#7b8794"
SANS, MONO = "Helvetica, Arial, sans-serif", "SFMono-Regular, Menlo, Consolas, monospace"
BOXES = {  # left, width, fill, formula, explanation
    "time": (10, 150, "#e4e7eb", "t in [0, 1]", ("depth, as a time",)),
    "embedding": (210, 190, "#cfe8ff", "e(t)", ("time embedding:", "T numbers")),
    "weights": (450, 230, "#ffe3c2", "W(t) = W0 + P e(t)", ("hypernetwork:", "weights of a step")),
    "field": (730, 220, "#d6f0d8", "f + g at W(t)", ("attention and MLP:", "dy/dt of the state")),
}
TOP, TALL = 30, 92
TIMELINE, STEPS = 220, 6


def text(x: float, y: float, words: str, size: int = 15, font: str = SANS, fill: str = INK) -> str:
    """Words centred at x, their baseline at y."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-family="{font}" font-size="{size}" fill="{fill}" '
        f'text-anchor="middle">{escape(words)}</text>'
    )


def box(left: int, width: int, fill: str, formula: str, lines: tuple[str, ...]) -> str:
    """A box with a formula, and the explanation below it."""
    middle = left + width / 2
    parts = [
        f'<rect x="{left}" y="{TOP}" width="{width}" height="{TALL}" rx="10" fill="{fill}" '
        f'stroke="{GREY}"/>',
        text(middle, TOP + 33, formula, 18, MONO),
        *(text(middle, TOP + 59 + 19 * n, line, 14) for n, line in enumerate(lines)),
    ]
    return "\n".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight arrow."""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{GREY}" stroke-width="2" marker-end="url(#head)"/>'


def timeline() -> str:
    """The state from t = 0 to t = 1 in N steps, and what reads W(t) where."""
    left, right = 140, 820
    step = (right - left) / STEPS
    nodes = [left + step * n for n in range(STEPS + 1)]
    parts = [arrow(a + 9, TIMELINE, b - 9, TIMELINE) for a, b in pairwise(nodes)]
    for n, x in enumerate(nodes):
        fill = "#e4e7eb" if n == 0 else "#ffe3c2"
        parts.append(f'<circle cx="{x:g}" cy="{TIMELINE}" r="7" fill="{fill}" stroke="{GREY}"/>')
    parts += [
        f'<rect x="10" y="{TIMELINE - 28}" width="102" height="56" rx="10" fill="#e4e7eb" '
        f'stroke="{GREY}"/>',
        text(61, TIMELINE - 5, "y(0)", 16, MONO),
        text(61, TIMELINE + 16, "embeddings", 14),
        f'<rect x="848" y="{TIMELINE - 28}" width="102" height="56" rx="10" fill="#e4e7eb" '
        f'stroke="{GREY}"/>',
        text(899, TIMELINE - 5, "y(1)", 16, MONO),
        text(899, TIMELINE + 16, "norm, head", 14),
        f'<rect x="200" y="{TIMELINE + 22}" width="560" height="36" rx="10" fill="#f5f7fa" '
        f'stroke="{GREY}"/>',
        text(480, TIMELINE + 45, "N solver steps of size dt = 1/N; dots are the nodes", 15),
    ]
    return "\n".join(parts)


def draw() -> str:
    """The picture as SVG."""
    middle = TOP + TALL / 2
    parts = [box(*each) for each in BOXES.values()]
    parts += [arrow(a, middle, b - 3, middle) for a, b in ((160, 210), (400, 450), (680, 730))]
    parts += [arrow(840, TOP + TALL, 763, TIMELINE - 14), timeline()]
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" \
aria-labelledby="title">
<title id="title">A time t gives an embedding e(t), which gives the weights W(t) of a solver \
step; N steps integrate the state from y(0) to y(1).</title>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker></defs>
{body}
</svg>
"""


if __name__ == "__main__":
    (Path(__file__).parent / "images" / "idea.svg").write_text(draw())
