"""The forms of an exported model: its tensors, its `config.json`, and what lies beside them."""

from pathlib import Path
from typing import ClassVar

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from t5x_diffeq.data.tokenizer import Border
from t5x_diffeq.hf.config_json import DIFFEQ_FORM, diffeq_config, plain_config
from t5x_diffeq.hf.families import Family
from t5x_diffeq.hf.layouts import diffeq_layout
from t5x_diffeq.model.block import PyTorchForm
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.sub_fields import declared_leaves, make_block, need_methods


class LibraryForm:
    """A class of transformers that computes what the model does on its grid.

    Attributes:
      layout: the tensors' names, and whether their matrices are transposed.
      files: PyTorch files that are copied into the folder.
      notes: what a user must know.
    """

    is_own: ClassVar[bool] = False  # whether the library needs code that comes with the folder

    def __init__(self, config: ModelConfig, kind: str, family: Family):
        self.config, self.kind, self.family = config, kind, family
        self.layout = family.layout
        self.files: set[Path] = set()
        self.notes: list[str] = []

    def weights(self, model: LanguageModel, params: dict, merged: bool) -> Weights:
        """The weights of the tensors; adapters are merged into the kernels, or left out."""
        return grid_weights(model, params, merged)

    def config_json(self, border: Border) -> dict:
        """The content of `config.json`."""
        return plain_config(self.config, self.kind, self.family, border)


class LayersForm:
    """The weights of a grid, with a PyTorch file of this package or of the block.

    It has the attributes of `LibraryForm`.
    """

    is_own: ClassVar[bool] = True

    def __init__(self, config: ModelConfig):
        self.config, self.form = config, self._pytorch_form(config)
        self.layout = diffeq_layout(config)
        self.files = {DIFFEQ_FORM.modeling, self.form.modeling}
        self.notes: list[str] = []

    def _pytorch_form(self, config: ModelConfig) -> PyTorchForm:
        need_methods(config, ("pytorch_form",))
        return make_block(config).pytorch_form() if config.block else DIFFEQ_FORM

    def weights(self, model: LanguageModel, params: dict, merged: bool) -> Weights:
        """The weights of the tensors; adapters are merged into the kernels, or left out."""
        return grid_weights(model, params, merged)

    def config_json(self, border: Border) -> dict:
        """The content of `config.json`."""
        return diffeq_config(self.config, self.form, border)


def grid_weights(model: LanguageModel, params: dict, merged: bool) -> Weights:
    """The grid's weights `[N, ...]` in float32; leaves that write to the residual include dt."""
    exact = LanguageModel(model.config.in_float32())
    method = "merged_weights" if merged else "weights"
    with jax.default_matmul_precision("highest"):
        weights = jax.jit(lambda params: exact.apply({"params": params}, method=method))(params)
    weights = {name: leaves for name, leaves in weights.items() if name != ADAPTERS}
    declared, dt = declared_leaves(model.config), model.config.dt
    return unflatten_dict(
        {
            path: leaf * dt if declared[path].writes_residual else leaf
            for path, leaf in flatten_dict(weights).items()
        }
    )
