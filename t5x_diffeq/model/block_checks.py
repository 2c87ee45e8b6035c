"""A check of a block of another package: it has f and g, and each returns the shape of the state.

Their dtype is not checked: a value of fewer bits is promoted where it is added to the state.
"""

import jax

from t5x_diffeq.model.block import Block
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.sub_fields import block_of_shapes
from t5x_diffeq.system.errors import InputError, describe_foreign


def check_block(config: ModelConfig) -> None:
    """Checks the block that `model.block` names; nothing is computed.

    Raises:
      InputError: if it has no f or no g, or if one of them can't be traced, or returns another
        shape than the state's.
    """
    block = block_of_shapes(config)
    y, places = block.input_shapes()
    for name, inputs in (("f", (y, places)), ("g", (y,))):
        if getattr(type(block), name) is getattr(Block, name):
            raise _refused(config, f"has no {name}; docs/extending.md says what a block needs")
        try:
            value, _ = jax.eval_shape(
                lambda key, *inputs, name=name: block.init_with_output(key, *inputs, method=name),
                jax.random.key(0),
                *inputs,
            )
        except InputError:
            raise
        except Exception as error:  # another package's code may raise anything
            raise _refused(
                config, f"has a method {name} that can't be traced: {describe_foreign(error)}"
            ) from error
        shape = getattr(value, "shape", None)
        if shape != y.shape:
            returned = list(shape) if shape is not None else type(value).__name__
            raise _refused(
                config, f"has a method {name} that returns {returned} for a state {list(y.shape)}"
            )


def _refused(config: ModelConfig, what: str) -> InputError:
    return InputError(f"model.block={config.block} {what}")
