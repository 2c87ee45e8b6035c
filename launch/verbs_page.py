"""Writes the page of all verbs: `PYTHONPATH=. python launch/verbs_page.py > docs/verbs.md`."""

import importlib
import re

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.cli import VERBS
from t5x_diffeq.cli.command_line import add_common_flags

_HEAD = """\
---
search: {boost: 12}
---

# Every verb and its flags

Each verb is run as `python -m t5x_diffeq.VERB`, and `--help` prints what this page says. Verbs that
take `--config` also take `--config.KEY=VALUE` for [every key](keys.md).

This page is generated from `t5x_diffeq/cli/`:

```bash
PYTHONPATH=. python launch/verbs_page.py > docs/verbs.md
```
"""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *map(_section, VERBS)])


def _section(verb: str) -> str:
    module = importlib.import_module(f"t5x_diffeq.cli.{verb}")
    doc = re.sub(r"--\w+(\.\w+)*(=[\w./*:,-]*\w)?", r"`\g<0>`", (module.__doc__ or "").strip())
    summary, _, rest = doc.partition("\n")
    add_common_flags(module.FLAGS)
    rows = [_row(module.FLAGS[name]) for name in module.FLAGS if "." not in name]
    table = ["| flag | default | meaning |", "|---|---|---|", *rows]
    return "\n".join([f"## {verb}", "", summary, *([rest] if rest else []), "", *table, ""])


def _row(flag: flags.Flag) -> str:
    text = re.sub(r"^<\S+>: ", "", flag.help.partition(";\n")[0])  # absl's notes
    meaning, _, default = text.partition(" [default: ")
    has_none = config_flags.is_config_flag(flag) or flag.boolean or flag.default in (None, [])
    if not has_none and not default:
        default = f"`{flag.default}`"
    cells = (f"`--{flag.name}`", default.rstrip("]"), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
