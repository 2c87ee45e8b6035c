"""The path of W(t) and its spectra, computed on the devices, against NumPy on the whole weights."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from helpers import auto_mesh, rules_of, small_config
from small_models import LLAMA, random_params, small

from t5x_diffeq.analysis import weight_paths
from t5x_diffeq.analysis.spectra import spectra
from t5x_diffeq.analysis.weight_paths import cosines, evenly, make_weight_paths, principal_path
from t5x_diffeq.model.sub_fields import make_block
from t5x_diffeq.training.partitioning import mesh_context


def found_and_weights(model, tmp_path):
    mesh = auto_mesh(fsdp=2, tensor=2)
    params = random_params(model)
    with mesh_context(mesh, rules_of(small_config(tmp_path))):
        found = make_weight_paths(model, mesh)(params)
    W = nn.apply(type(model).weights, model)({"params": params})
    return found, jax.tree.map(lambda x: np.asarray(x, np.float64), W)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt", "llama"])
def test_equal_numpy(changes, tmp_path):
    model = small(**changes)
    found, W = found_and_weights(model, tmp_path)
    kernels = {"/".join(p[:-1]): leaf for p, leaf in flatten_dict(W).items() if p[-1] == "kernel"}
    assert found.inner.keys() == kernels.keys() and len(kernels) >= 4
    for name, leaf in kernels.items():
        flat = leaf.reshape(len(leaf), -1)
        np.testing.assert_allclose(found.inner[name], flat @ flat.T, rtol=1e-4)
        centred = flat - flat.mean(0)
        path, shares = principal_path(found.centred[name])
        u, s, _ = np.linalg.svd(centred, full_matrices=False)
        np.testing.assert_allclose(np.abs(path), np.abs(u[:, :2] * s[:2]), atol=1e-3 * s[0])
        np.testing.assert_allclose(shares, s[:2] ** 2 / (s**2).sum(), rtol=1e-3)
        unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
        np.testing.assert_allclose(cosines(found.inner[name]), unit @ unit.T, atol=1e-4)
    whole = spectra(make_block(model.config), W)
    assert found.products.keys() == whole.keys() == {"qk", "ov", "mlp"}
    for name, values in whole.items():
        mine = np.linalg.eigvals(found.products[name].astype(np.float64))
        np.testing.assert_allclose(
            np.sort(np.abs(mine)), np.sort(np.abs(values)), atol=1e-4 * np.abs(values).max()
        )


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Of five nodes and four heads, the spectra of two and three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_paths, "_NODES", 2)
        patch.setattr(weight_paths, "_HEADS", 3)
        patch.setattr(weight_paths, "_LARGEST", 10)
        found, _ = found_and_weights(small(num_steps=5), tmp_path_factory.mktemp("it"))
    return found


def test_large_ones_are_sampled(sampled):
    found = sampled
    assert found.products.keys() == {"qk", "ov"}  # the MLP's is 16 x 16
    assert found.products["qk"].shape == (2, 3, 4, 4)
    np.testing.assert_allclose(found.product_times, found.times[[0, 4]])
    assert evenly(32, 4) == [0, 10, 21, 31] and evenly(3, 12) == [0, 1, 2]
