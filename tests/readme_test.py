"""What the READMEs list is what the code does."""

import re

import pytest
from helpers import READMES, ROOT

from configs import default
from t5x_diffeq.runs.workdir import may_change
from t5x_diffeq.runtime.config_files import flatten


def test_keys_that_may_change():
    text = (ROOT / "README.md").read_text()
    listed = text.partition("Between runs of a workdir these keys may change")[2].partition("\n\n")[
        0
    ]
    names = re.findall(r"`([\w.*]+)`", listed)
    patterns = [name.replace(".", r"\.").replace("*", ".*") for name in names]
    patterns += [f".*{name}" for name in names if name.startswith("_")]
    for key in flatten(default.get_config()):
        assert may_change(key) == any(re.fullmatch(p, key) for p in patterns), key


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """Files and headings that a README links to exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            headings = re.findall(
                r"^#+ (.*)$", (there / "README.md" if there.is_dir() else there).read_text(), re.M
            )
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, target
