"""`config.optimizer`: AdamW or another optimizer, its schedule and its weight decay."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.runtime.keys.key import (
    BelowOne,
    CountOrNone,
    Entries,
    Fraction,
    NotNegative,
    Positive,
    Section,
    Switch,
    key,
    one_of,
)
from t5x_diffeq.runtime.keys.values import MOMENTS, OPTIMIZERS, PLUGIN

_key = partial(key, branch=True, finetune=True)


@dataclass(frozen=True)
class OptimizerKeys(Section):
    """`config.optimizer`: AdamW or another optimizer, its schedule and its weight decay."""

    section = "optimizer"
    name: Annotated[str, one_of(*OPTIMIZERS, PLUGIN)] = _key(
        "adam",
        """for all parameters | muon: for the block's kernels, and Adam for all others, with the
        same learning rate (t5x_diffeq/optimizers/muon.py) | the importable name of a function that
        returns what stands in Adam's place, "package.module:make"
        (t5x_diffeq/optimizers/optimizer.py)""",
        branch=False,
    )
    learning_rate: Positive = _key(3e-3, "peak")
    role_multipliers: Entries = _key(
        (),
        """(role, factor) pairs: factors on the learning rate, and with it on the weight decay, of
        all parameters of a role: kernel, bias, scale, shift, embedding, time_embedding, adapter;
        with 0 they stay as they are""",
    )
    beta1: BelowOne = _key(0.9, "Adam's decay of the mean of gradients")
    beta2: BelowOne = _key(0.95, "Adam's decay of the mean of their squares")
    epsilon: Positive = _key(1e-8, "Adam's epsilon")
    momentum: BelowOne = _key(0.95, "Muon's decay of the mean of gradients")
    moments: Annotated[str, one_of(*MOMENTS)] = _key(
        "float32",
        """how Adam keeps its two means (t5x_diffeq/optimizers/moments.py) | bfloat16: rounded
        stochastically | int8: in blocks, for kernels of time-dependent and per-layer weights; muon
        takes float32 only""",
        branch=False,
    )
    offload: Switch = _key(
        False,
        """whether the moments, and the averages of train.ema_decay, lie in the host's memory
        outside the update, which takes longer for it (configs/README.md)""",
        resume=True,
    )
    weight_decay: NotNegative = _key(0.1, "decoupled")
    decay: Annotated[str, one_of("embeddings", "kernels", "all")] = _key(
        "kernels", "which parameters: embeddings | kernels (and embeddings) | all"
    )
    schedule: Annotated[str, one_of("cosine", "wsd")] = _key(
        "cosine",
        """after the warm-up: a cosine | wsd: the peak, then a cooldown, so that runs of several
        lengths can branch off before it (warm-up, stable, decay)""",
    )
    warmup_fraction: Fraction = _key(0.01, "of total_steps, linear")
    cooldown_steps: CountOrNone = _key(
        None,
        "wsd: steps at the end in which the learning rate falls linearly; None: a fifth of the run",
        resume=True,
    )
    end_lr_fraction: Fraction = _key(0.1, "learning rate at the end, relative to the peak")
    max_grad_norm: Positive = _key(1.0, "clip by global norm")
