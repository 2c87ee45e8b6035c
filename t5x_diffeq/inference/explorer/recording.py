"""The page as one file that needs no server: it holds the answers for a text at several depths."""

import json
from typing import Any

from t5x_diffeq.inference.explorer.answers import PAGE, Answer, Explorer
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.system.console import track
from t5x_diffeq.system.files import AnyPath, write_whole

_MOST_DEPTHS = 16
_MOST_TOKENS, _TEMPERATURE, _SEED = 100, 0.8, 0  # with which page.js begins
_NOTHING_FROM_OUTSIDE = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
)


def write_recording(path: AnyPath, explorer: Explorer, text: str | None = None) -> None:
    """Writes the file, for a text or, if it is None, for the start of the validation text.

    Raises:
      InputError: if the text can't be read.
      RunError: if the file can't be written.
    """
    about = explorer.about()
    text = about["text"] if text is None else text
    stride = -(-len(about["offered"]) // _MOST_DEPTHS)  # besides the trained depths
    depths = sorted({*about["offered"][::stride], *about["trained"]})
    run, scheme = {"run": about["name"]}, about["scheme"]
    shown = {**about, "text": text, "offered": depths, "schemes": [scheme]}
    answers: Answer = {_key("/api/runs", None): {"runs": [shown]}}
    answers[_key("/api/paths", run)] = explorer.paths()
    sampling = {"max_tokens": _MOST_TOKENS, "temperature": _TEMPERATURE, "seed": _SEED}
    for num_steps in track(depths, "recording", len(depths), "depths"):
        grid = (num_steps, scheme)
        on = {**run, "num_steps": num_steps, "scheme": scheme}
        answers[_key("/api/read", {"text": text, **on})] = explorer.read(text, grid)
        answers[_key("/api/validation", on)] = explorer.validation(grid)
        pieces = explorer.continuation(text, grid, _MOST_TOKENS, Sampling(_TEMPERATURE), _SEED)
        answers[_key("/api/continue", {"text": text, **on, **sampling})] = "".join(pieces)
    write_whole(path, _page(answers).encode())


def _key(path: str, body: dict[str, Any] | None) -> str:
    """A request as the page writes it (`requestKey` in views.js)."""
    return f"{path} {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}"


def _page(answers: Answer) -> str:
    """The page with its files and the answers inside."""
    page = (PAGE / "index.html").read_text("utf-8")
    style = (PAGE / "page.css").read_text("utf-8")
    page = page.replace(
        '<link rel="stylesheet" href="page.css">',
        f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FROM_OUTSIDE}">'
        f"<style>{style}</style>",
    )
    data = json.dumps(answers).replace("<", r"\u003c")
    scripts = [f'<script type="application/json" id="recorded">{data}</script>']
    for name in ("charts", "tokens", "views", "page"):
        page = page.replace(f'<script defer src="{name}.js"></script>\n', "")
        scripts.append(f"<script>{(PAGE / f'{name}.js').read_text('utf-8')}</script>")
    return page.replace("</body>", "".join(scripts) + "</body>")
