"""`config.optimizer`: AdamW or another optimizer, its schedule and its weight decay."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.config.keys import values
from t5x_diffeq.config.keys.values import Section, key, one_of, reads_as_data

_key = partial(key, branch=True, finetune=True)


@dataclass(frozen=True)
class OptimizerKeys(Section):
    """`config.optimizer`: AdamW or another optimizer, its schedule and its weight decay."""

    section = "optimizer"
    name: Annotated[str, one_of(*values.OPTIMIZERS, values.PLUGIN)] = _key("adam", branch=False)
    """`adam`: AdamW for all parameters. `muon`: Muon for the block's kernels and AdamW for all
    others, at the same learning rate. Otherwise the importable name of a function that returns a
    replacement for Adam, such as `package.module:make` ([Extending](extending.md))"""
    learning_rate: values.Positive = _key(3e-3)
    """peak learning rate"""
    role_multipliers: values.Entries = _key((), asks=reads_as_data)
    """(role, factor) pairs. A factor multiplies the learning rate, and with it the weight decay, of
    all parameters of a role: kernel, bias, scale, shift, embedding, time_embedding, adapter. With
    factor 0 they don't change. With `optimizer.name=muon`, time_embedding has factor 0 unless a
    pair names it ([why](lab/lead.md#with-muon-and-equal-weight-decay))"""
    beta1: values.BelowOne = _key(0.9)
    """Adam's decay of the mean of the gradients"""
    beta2: values.BelowOne = _key(0.95)
    """Adam's decay of the mean of the squared gradients"""
    epsilon: values.Positive = _key(1e-8)
    """Adam's epsilon"""
    momentum: values.BelowOne = _key(0.95)
    """Muon's decay of the mean of the gradients"""
    moments: Annotated[str, one_of(*values.MOMENTS)] = _key("float32", branch=False)
    """how Adam stores its two means. `float32`: as they are. `bfloat16`: rounded stochastically.
    Muon takes `float32` only"""
    weight_decay: values.NotNegative = _key(0.1)
    """coefficient of the decoupled weight decay"""
    decay: Annotated[str, one_of("embeddings", "kernels", "all")] = _key("kernels")
    """which parameters decay. `embeddings`: the embeddings. `kernels`: kernels and embeddings.
    `all`: all parameters"""
    schedule: Annotated[str, one_of("cosine", "wsd")] = _key("cosine")
    """the learning rate after the warm-up. `cosine`: a cosine. `wsd` (warm-up, stable, decay): the
    peak, then a linear cooldown. Runs of several lengths can branch off before the cooldown"""
    warmup_fraction: values.Fraction = _key(0.01)
    """fraction of `train.total_steps` over which the learning rate rises linearly to its peak"""
    cooldown_steps: values.CountOrNone = _key(None, resume=True)
    """for `wsd`: steps at the end over which the learning rate falls linearly. `None`: a fifth of
    the run"""
    end_lr_fraction: values.Fraction = _key(0.1)
    """learning rate at the end, as a fraction of the peak"""
    max_grad_norm: values.Positive = _key(1.0)
    """global norm to which gradients are clipped"""
