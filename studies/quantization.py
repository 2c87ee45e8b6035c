"""The loss of a trained run with rounded weights: are W(t) as robust as layers?

    python -m studies.quantization --workdir=DIR --bits=8 --bits=4

Prints as JSON the validation loss; the loss with rounded W(t), as if the weights were written out
as layers to serve them; and the loss with rounded W0 and P, from which W(t) is made. Kernels are
rounded to integers with a scale for each output: the largest entry of its column over the largest
integer, without zero points. Embeddings, biases and norms stay as they are.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
from absl import flags
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.cli import command_line, flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.inference.validation import evaluate_split
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.parameter import Parameter, flatten_parameters, num_inputs
from t5x_diffeq.model.sub_fields import declared_leaves
from t5x_diffeq.training.load import Run, discretise, load_run
from t5x_diffeq.training.placed_model import declared_params, place_model

FLAGS = VerbFlags("studies.quantization")
_WORKDIR = FLAGS.define_workdir()
_CHECKPOINT = FLAGS.define_checkpoint()
_NUM_STEPS = FLAGS.define_num_steps()
_BITS = flags.DEFINE_multi_integer(
    "bits", [8, 4], "Bits of an integer; may be repeated.", 2, 8, flag_values=FLAGS
)
_BATCH_SIZE = FLAGS.define_integer("batch_size", "Sequences per batch.", 32, 1)
_EVAL_BATCHES = FLAGS.define_integer(
    "eval_batches",
    "Evaluate only this many batches. [default: the whole validation split]",
    None,
    1,
)


def round_to_bits(
    kernel: Float[Array, "..."], bits: int, inputs: tuple[int, ...]
) -> Float[Array, "..."]:
    """The kernel with entries that are integers of `bits` bits times a scale for each output.

    Args:
      kernel: the kernel, perhaps with leading axes of nodes or of T.
      bits: number of bits of the integers, which are symmetric: -127 to 127 for 8.
      inputs: the axes that are summed over.
    """
    largest = 2 ** (bits - 1) - 1
    scale = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True) / largest
    return jnp.where(scale > 0, jnp.round(kernel / jnp.where(scale > 0, scale, 1)) * scale, 0)


def _input_axes(parameter: Parameter, leading: int) -> tuple[int, ...]:
    """The axes that a kernel of the block sums over, counted behind `leading` other axes."""
    shape, names = parameter.value.shape, parameter.names
    axes = [axis for axis, name in enumerate(names) if name != "maps"]
    count = num_inputs([shape[axis] for axis in axes], parameter.fan_in)
    return tuple(axis + leading for axis in axes[:count])


def with_rounded_weights(run: Run, bits: int) -> Run:
    """The run with the weights of a pass written out as layers, and rounded."""
    placed = run.placed
    config = placed.config.with_values(
        {"model.weights": "per_layer", "model.attention_time_embed_dim": None}
    )
    with placed.context():
        weights = jax.jit(discretise, static_argnums=0)(placed.model.config, run.params)
        rounded = _round_layers(weights, declared_leaves(placed.model.config), bits)
    layers = place_model(config, placed.model.config.vocab_size, placed.mesh)
    return replace(run, placed=layers, params={**run.params, "source": {"weights": rounded}})


def _round_layers(weights: Weights, declared: dict, bits: int) -> Weights:
    rounded = {
        path: round_to_bits(leaf, bits, _input_axes(declared[path], leading=1))
        if declared[path].role == "kernel"
        else leaf
        for path, leaf in flatten_dict(weights).items()
    }
    return unflatten_dict(rounded)


def with_rounded_params(run: Run, bits: int) -> Run:
    """The run with rounded parameters: W0 and each of the T matrices of P, or layers."""
    declared = flatten_parameters(declared_params(run.placed.model)["source"])
    rounded = {}
    for path, leaf in flatten_dict(run.params["source"]).items():
        box = declared[path]
        if box.role == "kernel":
            leading = int(box.names[:1] in (("time_embed",), ("steps",)))
            layer_box = box.replace(
                value=jax.ShapeDtypeStruct(leaf.shape[leading:], leaf.dtype),
                names=box.names[leading:],
            )
            leaf = round_to_bits(leaf, bits, _input_axes(layer_box, leading))
        rounded[path] = leaf
    return replace(run, params={**run.params, "source": unflatten_dict(rounded)})


def evaluate_rounded(
    run: Run, corpus: Corpus, bits: list[int], batch_size: int, limit: int | None
) -> dict[str, float]:
    """The validation loss as it is; and with rounded weights and parameters, by name.

    Args:
      run: the trained run.
      corpus: its data.
      bits: the numbers of bits to try.
      batch_size: sequences per batch.
      limit: only the first `limit` batches; None for the whole split.
    """

    def loss(rounded: Run) -> float:
        return evaluate_split(rounded, corpus, batch_size, limit)["loss"]

    losses = {"loss": loss(run)}
    for each in bits:
        losses[f"weights, {each} bits"] = loss(with_rounded_weights(run, each))
        losses[f"parameters, {each} bits"] = loss(with_rounded_params(run, each))
    return losses


def main() -> None:
    """The command."""
    workdir = flag_values.parse_folder(_WORKDIR, "quantization")
    corpus = load_corpus(workdir)
    run = load_run(
        workdir,
        corpus.tokenizer.vocab_size,
        batch_size=1,
        checkpoint=_CHECKPOINT.value,
        grids=[(_NUM_STEPS.value, None)],
    ).at_depth(_NUM_STEPS.value)
    losses = evaluate_rounded(run, corpus, _BITS.value, _BATCH_SIZE.value, _EVAL_BATCHES.value)
    print(json.dumps(losses))


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
