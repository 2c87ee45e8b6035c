"""What the tests of the images share."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def python_of_images() -> Path | None:
    """The images' Python, 3.12: PYTHON_OF_IMAGES, or the first one that runs."""
    named = os.environ.get("PYTHON_OF_IMAGES")
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.12*/bin/python3.12"))
    found = shutil.which("python3.12")
    current = [sys.executable] if sys.version_info[:2] == (3, 12) else []
    for candidate in [named] if named else [*current, *pyenv, *([found] if found else [])]:
        command = [candidate, "-c", "import sys; print(sys.version_info[:2], sys.base_prefix)"]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode == 0 and ended.stdout.startswith("(3, 12)"):
            prefix = ended.stdout.split(maxsplit=2)[2].strip()
            return Path(prefix) / "bin" / "python3.12"
    return None
