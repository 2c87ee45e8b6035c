"""Runs a verb on a mesh whose CPU devices are in another order, as those of a TPU pod are.

    python tests/support/device_order.py interleaved t5x_diffeq.train --config=FILE ...

A TPU mesh follows the torus of chips, so the devices of a process are not next to each other on it;
CPU devices always are. The order is `interleave` (the first device of each process, then the
second, ...), `reversed`, or `random`.
"""

import random
import runpy
import sys

import numpy as np
from jax.experimental import mesh_utils


def interleave(devices):
    """The first device of each process, then the second of each, ..."""
    processes = sorted({device.process_index for device in devices})
    own = ([d for d in devices if d.process_index == process] for process in processes)
    return [device for together in zip(*own, strict=True) for device in together]


ORDERS = {
    "interleaved": interleave,
    "reversed": lambda devices: devices[::-1],
    "random": lambda devices: random.Random(1).sample(devices, len(devices)),
}


def reorder(order):
    """Makes JAX arrange devices on a mesh in this order."""

    def create_device_mesh(shape, devices, **options):
        return np.array(ORDERS[order](list(devices))).reshape(shape)

    mesh_utils.create_device_mesh = create_device_mesh


if __name__ == "__main__":
    _, order, module, *_ = sys.argv
    sys.argv[:3] = [module]
    sys.path[0] = "."  # the project, as with `python -m`
    reorder(order)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
