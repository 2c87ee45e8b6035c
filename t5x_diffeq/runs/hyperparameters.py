"""What describes a run in a tracker: config, code, packages, devices, size, cost."""

import platform
import subprocess
from importlib import metadata
from math import prod
from pathlib import Path

import jax

from t5x_diffeq.models.sub_fields import has_method
from t5x_diffeq.planner.flops import step_flops
from t5x_diffeq.training.partitioning import describe_mesh
from t5x_diffeq.training.setup import Setup

_PACKAGES = ("t5x_diffeq", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_SECONDS_FOR_GIT = 10
_ROOT = Path(__file__).resolve().parents[2]  # of the clone, if there is one


def hyperparameters(setup: Setup) -> dict[str, object]:
    """The values that describe a run, by flat name.

    Returns:
      every key of the config by its dotted name; `git/commit` and `git/dirty`, if the code is in
      a clone; `version/<package>` of Python and of the packages that decide the numbers;
      `devices/kind`, `devices/count`, `devices/processes`, `devices/mesh`; `model/parameters`;
      `model/flops_per_token`, of a training step, if the block has `flops`.
    """
    c, params = setup.model.config, jax.tree.leaves(setup.abstract_state.params)
    cost = {}
    if has_method(c, "flops"):
        cost["model/flops_per_token"] = step_flops(c, 1).model / c.max_length
    return {
        **setup.config.flat(),
        **git_state(_ROOT),
        "version/python": platform.python_version(),
        **{f"version/{name}": _version(name) for name in _PACKAGES},
        "devices/kind": setup.mesh.devices.flat[0].device_kind,
        "devices/count": setup.mesh.size,
        "devices/processes": jax.process_count(),
        "devices/mesh": describe_mesh(dict(setup.mesh.shape)),
        "model/parameters": sum(prod(leaf.shape) for leaf in params),
        **cost,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a folder
        return "not installed"


def git_state(root: Path) -> dict[str, str | bool]:
    """`git/commit`, and `git/dirty`: whether tracked files differ from it; empty without a clone.

    Args:
      root: the folder that may be the root of a clone.
    """
    if not (root / ".git").exists():
        return {}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {
            "git/commit": commit,
            "git/dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):  # no git, not ours, no commit, too slow
        return {}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_SECONDS_FOR_GIT
    )
    return ended.stdout.strip()
