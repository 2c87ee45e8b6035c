"""Python environments of their own, for packages that the tests' own environment hasn't."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_UV = (sys.executable, "-m", "uv")
_MINUTES = 10


def make_environment(folder: Path, *wanted: str, python: str = sys.executable) -> Path:
    """The Python of a new environment in `folder`, with what `uv pip install` makes of `wanted`.

    It is made of another `python`.

    Where that can't be installed, the test that asks for it is skipped.
    """
    made = folder / "bin" / "python"
    # uv doesn't read pip's settings; a wheel found there is preferred to the registry's.
    links = os.environ.get("PIP_FIND_LINKS")
    environment = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}
    for command in (
        [*_UV, "venv", "--quiet", "--python", python, folder],
        [*_UV, "pip", "install", "--quiet", "--python", made, *wanted],
    ):
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60 * _MINUTES
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{' '.join(wanted)} took over {_MINUTES} minutes to install")
        if ended.returncode != 0:
            pytest.skip(f"{' '.join(wanted)} can't be installed: {ended.stderr[-300:]}")
    return made
