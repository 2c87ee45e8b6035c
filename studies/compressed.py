"""A GPT with fewer sets of layer weights, as a run at step 0 that can be tuned.

    python -m studies.compressed --workdir=DIR --output=NEW --kind=ode --sets=4

DIR holds a trained run with per-layer weights. The new run has K sets of weights in place of the N
layers:

    ode        W(t_n) = W0 + P e(t_n) with T = K - 1, the closest in least squares; N steps
    nested     layers 1, 1 + N/K, ..., each read N/K times in a row; N steps
    averaged   the same, each the mean of the layers in whose place it is read; N steps
    dropped    K of the layers, evenly spaced from the first to the last; K steps

Prints the new run's validation loss as JSON.
"""

import json
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from t5x_diffeq.cli import command_line, flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.hf.folder import local_path
from t5x_diffeq.hf.new_run import write_run
from t5x_diffeq.inference.validation import evaluate_split
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.ode.weight_source import OFFSET, LeafPath
from t5x_diffeq.model.sub_fields import declared_leaves
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import load_run

FLAGS = VerbFlags("studies.compressed")
_WORKDIR = FLAGS.define_workdir()
_OUTPUT = FLAGS.define_text("output", "Workdir to write; it must be new or empty.")
_KIND = FLAGS.define_text("kind", "One of ode, nested, averaged, dropped.")
_SETS = FLAGS.define_integer("sets", "K, the sets of weights; less than N.", 2, 2)
_BATCHES, _BATCH_SIZE = 32, 64  # of the validation split
Layers = dict[LeafPath, Float[np.ndarray, "N ..."]]


def _ode(config: ModelConfig, layers: Layers, sets: int) -> dict:
    """W0 and P with the smallest squared error, summed over a layer's leaves.

    The layer's e(t_n) are the first T left singular vectors of its weights, of which kernels are
    centred, since W0 takes their mean. Biases and scales have no W0 (`weight_source.OFFSET`).
    """
    declared, T = declared_leaves(config), sets - 1
    by_layer: dict[tuple[str, ...], list[LeafPath]] = {}
    for path in layers:
        by_layer.setdefault(path[:-1], []).append(path)
    source: dict[tuple[str, ...], np.ndarray] = {}
    for layer, paths in by_layer.items():
        wanted, bases = [], {}
        for path in paths:
            leaf = layers[path].reshape(config.num_steps, -1).astype(np.float64)
            leaf = leaf - OFFSET[declared[path].role]
            if declared[path].role == "kernel":
                bases[path] = leaf.mean(0)
                leaf = leaf - bases[path]
            wanted.append(leaf)
        left = np.linalg.svd(np.concatenate(wanted, 1), full_matrices=False)[0][:, :T]
        e = left * np.sqrt(config.num_steps)  # mean squares of 1, as those of a new model
        name = ".".join(layer)
        source[name, "time_embedding", "coefficients"] = e
        for path, leaf in zip(paths, wanted, strict=True):
            shape = layers[path].shape[1:]
            source[name, path[-1]] = (np.linalg.pinv(e) @ leaf).reshape(T, *shape)
            if path in bases:
                source[name, f"{path[-1]}_base"] = bases[path].reshape(shape)
    return unflatten_dict({path: leaf.astype(np.float32) for path, leaf in source.items()})


def _stacked(choose: Callable[[np.ndarray, int], np.ndarray]) -> Callable[..., dict]:
    def stack(config: ModelConfig, layers: Layers, sets: int) -> dict:
        return {"weights": unflatten_dict({p: choose(leaf, sets) for p, leaf in layers.items()})}

    return stack


def _groups(leaf: np.ndarray, sets: int) -> np.ndarray:
    return leaf.reshape(sets, len(leaf) // sets, *leaf.shape[1:])


def _evenly(leaf: np.ndarray, sets: int) -> np.ndarray:
    return leaf[np.linspace(0, len(leaf) - 1, sets).round().astype(int)]


KINDS: dict[str, Callable[[ModelConfig, Layers, int], dict]] = {
    "ode": _ode,
    "nested": _stacked(lambda leaf, sets: _groups(leaf, sets)[:, 0]),
    "averaged": _stacked(lambda leaf, sets: _groups(leaf, sets).mean(1)),
    "dropped": _stacked(_evenly),
}


def compressed_keys(model: ModelKeys, kind: str, sets: int) -> ModelKeys:
    """`config.model` of the compressed model, from that of the layers."""
    if kind == "ode":
        return replace(
            model,
            weights="time_dependent",
            time_embed_dim=sets - 1,
            attention_time_embed_dim=None,
            time_basis=f"table:{model.num_steps}",
            init="invariant",
        )
    if kind == "dropped":
        return replace(model, num_steps=sets)
    nested = f"examples.depth.nested_layers:NestedLayers(layers={sets})"
    return replace(model, weights=nested)


def main() -> None:
    """The command."""
    workdir = flag_values.parse_folder(_WORKDIR, "compressed")
    target = local_path(flag_values.parse_folder(_OUTPUT, "compressed"), "output")
    kind, sets = _KIND.value, _SETS.value
    if kind not in KINDS:
        raise InputError(f"--kind={kind} must be {', '.join(KINDS)}")
    corpus = load_corpus(workdir)
    run = load_run(workdir, corpus.tokenizer.vocab_size, batch_size=1)
    config, model = run.placed.config, run.placed.model.config
    if config.model.weights != "per_layer" or model.num_steps % sets or sets >= model.num_steps:
        raise InputError(
            f"--sets={sets} must divide the number of layers and be smaller, and --workdir="
            f"{workdir} must hold a run of per_layer weights; it has {config.model.weights} "
            f"weights and {model.num_steps} steps"
        )
    params = jax.tree.map(np.asarray, run.params)
    layers = flatten_dict(params["source"]["weights"])
    new = replace(config, model=compressed_keys(config.model, kind, sets))
    source = KINDS[kind](model, layers, sets)
    write_run(new, corpus.tokenizer, {**params, "source": source}, target)
    compressed = load_run(target, corpus.tokenizer.vocab_size, batch_size=1)
    print(json.dumps({"loss": evaluate_split(compressed, corpus, _BATCH_SIZE, _BATCHES)["loss"]}))


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
