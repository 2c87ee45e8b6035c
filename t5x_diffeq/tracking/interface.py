"""What a tracker, or a writer of files, can do: a part of the interface of clu's metric writers.

The names and parameters are those of `clu.metric_writers.interface.MetricWriter`, which can't be
imported without TensorFlow; a test compares the two.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray
Scalar: TypeAlias = float | int | np.number


class Tracker:
    """Keeps what a run reports at an optimizer step; does nothing in the methods it leaves out."""

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers by name."""

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images by name: uint8 arrays `[H, W, C]` with C = 1, 3 or 4."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes plain texts by name."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes what describes the run as a whole, once per start: flat names with values."""

    def rewind(self, step: int) -> None:
        """Prepares for the steps after `step` being written again."""

    def close(self) -> None:
        """Stores everything; the tracker is unusable afterwards."""
