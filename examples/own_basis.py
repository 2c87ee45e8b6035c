"""A time basis of one's own: Chebyshev's polynomials.

    python -m examples.own_basis

e(t) is a linear function of the basis's functions, and W(t) = W0 + P e(t) is one of e(t). A basis
says how many functions it has, and computes them; `docs/extending.md` lists what else it can say.
"""

# %%
from dataclasses import dataclass

import jax.numpy as jnp

import t5x_diffeq as td


@dataclass(frozen=True)
class Chebyshev(td.TimeBasis):
    """T_0, ..., T_(K-1) of x = 2 t - 1, by T_(k+1) = 2 x T_k - T_(k-1)."""

    count: int
    polynomial = True  # so that the hypernetwork itself can be exported

    def __call__(self, times):
        """The polynomials at each time: `[times, K]`."""
        x = 2 * times.astype(jnp.float32) - 1
        T = [jnp.ones_like(x), x]
        while len(T) < self.count:
            T.append(2 * x * T[-1] - T[-2])
        return jnp.stack(T[: self.count], axis=-1)


# %% A config names it as package.module:Name, with its arguments, here this file.
if __name__ == "__main__":
    SIZES = {
        "model.time_basis": "examples.own_basis:Chebyshev(5)",
        "model.num_steps": 4,
        "model.embed_dim": 64,
        "model.mlp_dim": 128,
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.total_steps": 20,
        "train.eval_batches": 2,
        "train.eval_all_at_end": False,
    }
    run = td.train(td.load_config("configs/tiny.py", SIZES), "workdirs/own_basis")
    print(run.evaluate(eval_batches=2))
