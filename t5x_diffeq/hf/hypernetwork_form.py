"""The export form that keeps W(t) as a polynomial of t, for any number of steps.

    W(t) = sum over k < K of Q_k P_k(2 t - 1)         P_k: Legendre's polynomials
    Q_k  = (2 k + 1) / 2 * sum over j of w_j P_k(x_j) W((x_j + 1) / 2)

The K nodes x_j and weights w_j are those of Gauss-Legendre quadrature, which integrates a product
of two polynomials of degree K - 1 exactly. `modeling_diffeq_hypernetwork.py` reads the Q_k.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from t5x_diffeq.hf.forms import LayersForm
from t5x_diffeq.hf.layouts import torch_name
from t5x_diffeq.model.block import PyTorchForm
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import declared_leaves
from t5x_diffeq.system.errors import InputError

LAYERS, HYPERNETWORK = "layers", "hypernetwork"


class PolynomialForm(LayersForm):
    """The coefficients of W(t), with the PyTorch file that reads them.

    Raises:
      InputError: if W(t) is no polynomial of t, or the step size is not 1/N or c/N.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.notes = [
            "`from_pretrained(..., num_steps=24)` sets the number of solver steps, which is "
            f"{config.num_steps} if it isn't given."
        ]

    def _pytorch_form(self, config: ModelConfig) -> PyTorchForm:
        _check_polynomial(config)
        written = [path for path, leaf in declared_leaves(config).items() if leaf.writes_residual]
        (node,) = find_scheme(config.scheme).nodes
        return PyTorchForm(
            Path(__file__).with_name("modeling_diffeq_hypernetwork.py"),
            "HypernetworkConfig",
            "HypernetworkModel",
            "HypernetworkForCausalLM",
            {
                "model_type": "t5x_diffeq_hypernetwork",
                "num_polynomials": _num_polynomials(config),
                "span": config.dt * config.num_steps,
                "node": node,
                "scaled_by_step": sorted(map(torch_name, written)),
            },
        )

    def weights(self, model: LanguageModel, params: dict, merged: bool) -> Weights:
        """Q_k of every weight, float32: the block's tree, leaves `[K, ...]`."""
        exact, K = LanguageModel(model.config.in_float32()), _num_polynomials(model.config)
        x, w = np.polynomial.legendre.leggauss(K)
        with jax.default_matmul_precision("highest"):
            at_nodes = exact.apply(
                {"params": params}, jnp.asarray((x + 1) / 2, jnp.float32), method="weights"
            )
        k = np.arange(K)
        project = (2 * k[:, None] + 1) / 2 * w * np.polynomial.legendre.legvander(x, K - 1).T
        return unflatten_dict(
            {
                path: np.tensordot(project, np.asarray(W, np.float64), 1).astype(np.float32)
                for path, W in flatten_dict(at_nodes).items()
            }
        )


def _check_polynomial(config: ModelConfig) -> None:
    """Checks that W(t) is a polynomial of t and that dt follows from N (else: InputError)."""
    wrong = []
    if source_of(config).num_polynomials() is None:
        wrong.append(
            f"model.weights={config.weights} with model.time_basis={config.time_basis} (it takes "
            "time_dependent with legendre:K, as of the variant :smooth, or shared)"
        )
    if not config.step_size.endswith("/N"):
        wrong.append(f"model.step_size={config.step_size} (it takes 1/N and the like)")
    if config.block:
        wrong.append(f"model.block={config.block} (it takes our own blocks)")
    if wrong:
        raise InputError(
            f"--form=hypernetwork can't write {' and '.join(wrong)}; export the layers of a grid: "
            "--form=layers"
        )


def _num_polynomials(config: ModelConfig) -> int:
    count = source_of(config).num_polynomials()
    assert count is not None  # `_check_polynomial`
    return count
