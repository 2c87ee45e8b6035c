"""A scheme of one's own, on a field of one's own and in a model.

python -m examples.own_scheme
"""

# %%
import jax.numpy as jnp
import numpy as np

import t5x_diffeq as td


# %% Ralston's method of order 2, with the least error bound (Ralston 1962), as in a textbook.
# W holds the weights at the scheme's nodes, in units of the step size.
def ralston_step(field, W, y, dt):
    """One step."""
    W0, W1 = W
    k1 = field(W0, y)
    k2 = field(W1, y + 2 / 3 * dt * k1)
    return y + dt * (k1 + 3 * k2) / 4


ralston = td.Scheme(ralston_step, nodes=(0.0, 2 / 3), order=2, evaluations=(2, 2))
NAME = "examples.own_scheme:ralston"  # where a config finds it: package.module:name


# %% A rotation whose speed grows with t: y(1) is y(0) turned by half a radian.
def spin(t, y):
    """dy/dt at time t."""
    return t * jnp.array([-y[1], y[0]])


def errors(scheme):
    """The error at t = 1 with 8, 16 and 32 steps."""
    exact = np.array([np.cos(0.5), np.sin(0.5)])
    return [
        float(
            np.linalg.norm(
                td.integrate(spin, lambda t: t, start, scheme=scheme, num_steps=n) - exact
            )
        )
        for n in (8, 16, 32)
    ]


if __name__ == "__main__":
    start = jnp.array([1.0, 0.0])
    for scheme in ("euler", "heun", NAME, "rk4"):
        by_steps = errors(scheme)
        print(f"{scheme}: errors {by_steps}, order {np.log2(by_steps[0] / by_steps[1]):.2f}")

    # The same scheme in a model, by its name, which every verb finds in the run's config.json.
    config = td.load_config(
        "configs/tiny.py",
        {
            "model.scheme": NAME,
            "model.num_steps": 2,
            "model.embed_dim": 64,
            "model.mlp_dim": 128,
            "data.tokenizer": "bytes",
            "data.sequence_length": 64,
            "train.total_steps": 20,
            "train.eval_batches": 2,
            "train.eval_all_at_end": False,
        },
    )
    run = td.train(config, "workdirs/own_scheme")
    print(run.evaluate(eval_batches=2))
