"""Writes docs/notebooks: each script of examples as a notebook, and as a page of the site.

    python launch/notebooks.py                         writes notebooks that are missing, or whose
                                                       script has changed, without their output
    python launch/notebooks.py --execute [NAME ...]    executes all, or these, which takes minutes

The scripts are in jupytext's percent format. A page shows what its cells print on standard output.
"""

import argparse
import ast
import os
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"


def write(script: Path, executed: bool) -> None:
    """Writes NAME.ipynb and NAME.md; an executed notebook stays until its script changes."""
    file = FOLDER / f"{script.stem}.ipynb"
    notebook = jupytext.reads(with_markdown_cells(script.read_text("utf-8")), "py:percent")
    if executed:
        execute(notebook)
    elif file.exists() and sources(jupytext.read(file)) == sources(notebook):
        notebook = jupytext.read(file)
    link = f"[This page as a notebook]({file.name})\n"
    FOLDER.mkdir(exist_ok=True)
    file.write_text(jupytext.writes(notebook, "ipynb"), "utf-8")
    file.with_suffix(".md").write_text(page(notebook) + link, "utf-8")


def sources(notebook: NotebookNode) -> list[str]:
    """The sources of its cells."""
    return [cell.source for cell in notebook.cells]


def execute(notebook: NotebookNode) -> None:
    """Runs the cells in a temporary folder; the notebook then has their outputs."""
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=None,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        ).execute(env=environment, stderr=subprocess.DEVNULL)  # an error of a cell is raised anyway


def with_markdown_cells(script: str) -> str:
    """The script with its docstring, and the comment that begins a cell, as cells of Markdown."""
    docstring = ast.get_docstring(ast.parse(script)) or ""
    command = re.compile(r"^ *(python -m \S+)$", re.M)
    text = command.sub(r"```bash\n\1\n```", f"# {docstring}".replace(".\n", "\n", 1))
    head = "# %% [markdown]\n" + textwrap.indent(text, "# ", lambda line: True)
    body = script[script.index('"""', 3) + 3 :]
    return head + re.sub(
        r"^# %% (.*\n(?:# .*\n)*)", r"# %% [markdown]\n# \1\n# %%\n", body, flags=re.M
    )


def page(notebook: NotebookNode) -> str:
    """The notebook in Markdown, with what its cells printed."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source:
            parts.append(f"```python\n{cell.source}\n```")
            printed = [
                each.text for each in cell.get("outputs", ()) if each.get("name") == "stdout"
            ]
            if printed:
                parts.append(f"```text\n{''.join(printed).rstrip()}\n```")
    return "\n\n".join(parts) + "\n\n"


if __name__ == "__main__":
    scripts = {path.stem: path for path in sorted((ROOT / "examples").glob("[!_]*.py"))}
    parser = argparse.ArgumentParser()
    parser.add_argument("--execute", nargs="*", choices=scripts, metavar="NAME")
    names = parser.parse_args().execute
    executed = scripts.keys() if names == [] else names or ()
    for name, script in scripts.items():
        write(script, name in executed)
