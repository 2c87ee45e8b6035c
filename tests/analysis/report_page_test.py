"""The page in a real browser: on a phone, in the dark and on paper, every figure can be read."""

import browser
import jax
import numpy as np
import pytest
from small_models import TOKENS, random_params, small

from t5x_diffeq.analysis import clustering_section
from t5x_diffeq.analysis.clustering import outcomes
from t5x_diffeq.analysis.lyapunov_section import lyapunov_section
from t5x_diffeq.analysis.report import write_report
from t5x_diffeq.analysis.spectra_section import spectra_section

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not()),
]
MEASURE = """
const style = (element) => getComputedStyle(element);
const shown = [...document.querySelectorAll('svg.chart')].filter(s => style(s).display != 'none');
const scale = (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
return {
  overflow: document.documentElement.scrollWidth - innerWidth,
  ink: style(document.body).color,
  soft: style(document.querySelector('figcaption')).color,
  link: style(document.querySelector('a')).color,
  paper: style(document.body).backgroundColor,
  figures: document.querySelectorAll('figure').length,
  shown: shown.length,
  text: Math.min(...shown.flatMap(svg => [...svg.querySelectorAll('text')].map(
    text => parseFloat(style(text).fontSize) * scale(svg)))),
  fills: [...new Set(shown.flatMap(svg => [...svg.querySelectorAll('text')].map(
    text => style(text).fill)))],
  outside: shown.filter(svg => [...svg.querySelectorAll('text:not(:has(tspan))')].some(text => {
    const box = text.getBoundingClientRect(), around = svg.getBoundingClientRect();
    return box.left < around.left - 3 || box.right > around.right + 3; })).length,
  title: document.querySelector('h1').textContent,
  targets: [...document.querySelectorAll('nav a')].map(
    a => document.querySelector(a.getAttribute('href')).querySelector('h2').textContent),
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """All three sections, of a model of random parameters."""
    model = small(num_steps=6)
    params = random_params(model)
    few = lambda seeds: outcomes(("peak",), (1.0,), (1.0,), seeds=seeds)  # noqa: E731
    pieces = ["<b>", "lambda", " x_i", "\n", "`$", "\t", " a long token", "!"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering_section.clustering, "outcomes", few)
        sections = [
            spectra_section(model, params, 9, {6: 20.5, 12: 31.0}),
            lyapunov_section(model, params, [TOKENS[0, :8].tolist()], [pieces], "pair"),
            clustering_section.clustering_section(2),
        ]
    jax.clear_caches()
    folder = tmp_path_factory.mktemp("page")
    return write_report(folder, "report.html", "Analysis of run", {"run": "/x" * 99}, sections)


@pytest.fixture(scope="module")
def chromium():
    with browser.open_browser() as opened:
        yield opened


def luminance(colour):
    parts = np.array([float(part) for part in colour[4:-1].split(",")]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


def contrast(colour, other):
    """WCAG's ratio."""
    low, high = sorted(map(luminance, (colour, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page(page, chromium, width, scheme, tmp_path):
    chromium.show(page, width, scheme)
    found = chromium.run(MEASURE)
    chromium.save_picture(tmp_path / f"{width}_{scheme}.png")
    assert found["overflow"] <= 0
    assert found["shown"] == found["figures"] == 8 + 1 + 3
    assert found["text"] >= 6 and found["outside"] == 0
    assert (luminance(found["paper"]) > 0.9) == (scheme == "light")
    assert contrast(found["ink"], found["paper"]) >= 7
    assert contrast(found["soft"], found["paper"]) >= 4.5
    assert contrast(found["link"], found["paper"]) >= 4.5
    assert found["fills"] == [found["ink"]]
    assert found["title"] == "Analysis of run"
    assert found["targets"] == [
        "Spectra",
        "Sensitivity to tokens",
        "Clustering under attention alone",
    ]


def test_print_is_black_on_white_whatever_the_screen(page, chromium):
    chromium.show(page, 794, "dark", media="print")
    found = chromium.run(MEASURE)
    assert (found["ink"], found["paper"]) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    assert found["fills"] == ["rgb(0, 0, 0)"] and found["shown"] == found["figures"]
    assert chromium.run(
        "return getComputedStyle(document.querySelector('figure')).breakInside"
    ) == ("avoid")
