"""A hook of MkDocs: each script of examples as a notebook, executed, and as a page.

The scripts are in jupytext's percent format. The page shows what cells print on standard output.
EXAMPLES=own_hook,own_block in the environment executes these alone; EXAMPLES= executes none.
"""

import ast
import functools
import os
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds notebooks/NAME.ipynb and notebooks/NAME.md for each example."""
    for script in sorted((ROOT / "examples").glob("[!_]*.py")):
        executed = script.stem in os.environ.get("EXAMPLES", script.stem).split(",")
        notebook = make_notebook(script.read_text(), executed)
        link = f"[This page as a notebook]({script.stem}.ipynb)\n"
        contents = {".ipynb": jupytext.writes(notebook, "ipynb"), ".md": page(notebook) + link}
        for ending, content in contents.items():
            name = f"notebooks/{script.stem}{ending}"
            files.append(File.generated(config, name, content=content))
    return files


@functools.cache  # `mkdocs serve` calls the hook again after each change of a page
def make_notebook(script: str, executed: bool) -> NotebookNode:
    """The notebook of a script, with the outputs of its cells if it is executed."""
    notebook = jupytext.reads(with_markdown_cells(script), "py:percent")
    if not executed:
        return notebook
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=None,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        ).execute(env=environment, stderr=subprocess.DEVNULL)  # what cells raise comes here anyway
    return notebook


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
