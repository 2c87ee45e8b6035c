"""What the analysis measures, on a run that this script trains first.

    python -m examples.analysis_of_a_run

`python -m t5x_diffeq.analyze all --workdir=DIR --output=OUT` makes a page of it.
"""

# %%
import numpy as np

import t5x_diffeq as td
from t5x_diffeq.analysis.lyapunov import lyapunov_exponents
from t5x_diffeq.analysis.spectra import copying_score, growth, spectra
from t5x_diffeq.model.sub_fields import make_block

# %%
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
run = td.train(config, "workdirs/example")
nodes = td.grid(config.model.scheme, config.model.num_steps).reshape(-1)

# %% Spectra: eigenvalues of W_Q W_K^T and W_V W_O of each head, and of W_up W_down, at the nodes.
model = run.run.placed.model.config
products = spectra(make_block(model), run.weights(nodes))
for name, values in products.items():
    print(name, values.shape, {key: round(value, 3) for key, value in growth(values).items()})
print(
    "copying score of each head at the last node:", np.round(copying_score(products["ov"][-1]), 2)
)

# %% Lyapunov exponents: how a change of each token's state at t = 0 grows until t = 1, in the state
# from which the token after the last one is predicted.
tokens = run.tokens("def main():")[None]
exponents = lyapunov_exponents(
    run.run.placed.model, run.run.params, tokens, outputs=np.array([tokens.shape[1] - 1])
)
for piece, largest in zip(run.pieces("def main():"), exponents.largest[0], strict=True):
    print(f"{piece!r}: largest exponent {largest:.3f}")
