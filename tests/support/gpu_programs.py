"""Compiles small train steps, and a decode step, for GPUs that aren't there; one line of JSON each.

python tests/support/gpu_programs.py [CASE ...]
"""

import json
import re
import sys
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from configs import default
from t5x_diffeq.config.config import Config
from t5x_diffeq.inference.sampling import Sampling, extend, make_caches, make_weights_by_step
from t5x_diffeq.planner.collectives import collectives
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.training.setup import make_setup
from t5x_diffeq.training.step import lower_train_step

ROWS, NODES = 16, 2
SMALL = {
    "model.architecture": "llama",
    "model.vocab_size": 512,
    "model.embed_dim": 256,
    "model.num_heads": 4,
    "model.mlp_dim": 256,
    "model.num_steps": 2,
    "model.time_embed_dim": 8,
    "model.num_frequencies": 4,
    "model.dtype": "bfloat16",
    "data.sequence_length": 128,
    "data.cross_documents": True,
    "train.batch_size": ROWS,
}
CASES = {  # topology, variant, keys
    "ode": ("h100:2x8", "ode", {}),
    "baseline": ("h100:2x8", "baseline", {}),
    "grouped queries": ("h100:8", "ode", {"model.num_kv_heads": 2, "mesh.tensor": 2}),
    "documents, tensor, bfloat16 moments": (
        "h100:8",
        "ode",
        {"data.cross_documents": False, "mesh.tensor": 2, "optimizer.moments": "bfloat16"},
    ),
    "wide heads": ("h100:8", "ode", {"model.num_heads": 1}),
    "context, microbatches": ("h100:8", "ode", {"mesh.context": 2, "train.microbatches": 2}),
    "muon": ("h100:8", "ode", {"optimizer.name": "muon"}),
    "decoding": ("h100:8", "ode", {"model.num_kv_heads": 2, "mesh.tensor": 2}),
}


def setup_of(topology, variant, keys):
    config = default.set_variant(default.get_config(), variant)
    config.update_from_flattened_dict({**SMALL, **keys})
    config = Config.of(config)
    slices = topology.nodes
    return make_setup(config, config.model.vocab_size, topology.devices, slices)


def compiled_step(topology, variant, keys):
    with topology.as_target():
        setup = setup_of(topology, variant, keys)
        with setup.context():
            return setup, lower_train_step(setup, ROWS).compile()


def compiled_decoding(topology, variant, keys):
    """The step that generates a token for each row, with caches of the model's length."""
    with topology.as_target():
        setup = setup_of(topology, variant, keys)
        model, params = setup.model, setup.abstract_state.params
        with setup.context():
            weights = jax.eval_shape(partial(make_weights_by_step, model), params)
            caches = jax.eval_shape(partial(make_caches, model, ROWS, model.config.max_length))
            tokens = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)
            last = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
            random = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
            arguments = (params, weights, tokens, tokens, last, random, caches)
            return setup, extend.lower(model, Sampling(), *arguments).compile()


def gradient_bytes(setup):
    """Of a device's part of it, as devices exchange it: stacked kernels in bfloat16."""
    leaves = jax.tree.leaves(setup.abstract_state.params)
    sizes = (prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    return sum(size * (2 if leaf.ndim > 2 else 4) for leaf, size in zip(leaves, sizes, strict=True))


def describe(setup, program):
    text = program.as_text()
    per_node = setup.mesh.size // NODES
    crossing = [
        c for c in collectives(text) if len({n // per_node for n in c.group or range(2)}) > 1
    ]
    return {
        "mesh": dict(setup.mesh.shape),
        "kernels": sorted(set(re.findall(r'custom_call_target="(__[^"]+)"', text))),
        "gradient": gradient_bytes(setup),
        "between_nodes": sum(c.bytes for c in crossing),
    }


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        name, *rest = CASES[case]
        compile_it = compiled_decoding if case.startswith("decoding") else compiled_step
        try:
            told = describe(*compile_it(make_topology(name), *rest))
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": case, **told}), flush=True)
