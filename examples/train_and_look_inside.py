"""Train a small neural ODE transformer, then look at its weights, states and text.

    python -m examples.train_and_look_inside

Two minutes on a laptop; everything is written to workdirs/example.
"""

# %%
import numpy as np

import t5x_diffeq as td

# %% Any key of a config can be changed; docs/keys.md explains all of them.
config = td.load_config(
    "configs/tiny.py",
    {
        "model.num_steps": 4,
        "model.embed_dim": 64,
        "model.mlp_dim": 256,
        "model.time_embed_dim": 16,
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.total_steps": 40,
        "train.eval_batches": 2,
        "train.eval_all_at_end": False,
    },
)
run = td.train(config, "workdirs/example")  # called again, it resumes, or returns the finished run

# %% The weights of the block are functions of depth t: here at three times.
W = run.weights(t=[0.25, 0.5, 0.75])
up = np.asarray(W["mlp"]["up"]["kernel"])  # [3, width, width of the MLP]
print(f"mlp.up: {up.shape}; it moves by {np.abs(up[1] - up[0]).mean():.2g} per quarter of depth")

# %% The residual stream is the state y(t) of a differential equation.
states = np.asarray(run.trajectory("def main():"))  # [steps + 1, tokens, width]
speed = np.linalg.norm(np.diff(states, axis=0), axis=-1).mean(-1) * config.model.num_steps
print("mean |dy/dt| of each step:", np.round(speed, 2))

# %% Its loss on a text, and the perplexity of its validation split on other grids.
print(f"{run.loss('import numpy as np'):.3f} nats per token")
for steps in (2, 4, 8):
    print(steps, "steps:", run.at_depth(steps).evaluate(eval_batches=2))
print("Heun:", run.at_depth(4, scheme="heun").evaluate(eval_batches=2))

# %% And text. The model has seen 41 thousand characters, so don't expect much.
for text in run.generate(["def main():", "import "], max_tokens=20):
    print(repr(text))
