"""The keys that are in no section: the seed, and the run that `finetune` starts from."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.config.keys.key import CountOrNone, Section, TextOrNone, key
from t5x_diffeq.config.keys.values import SEEDS, Values

_key = partial(key, finetune=True)


@dataclass(frozen=True)
class RunKeys(Section):
    """`config` itself: the seed, and the run that `finetune` starts from."""

    seed: Annotated[int, Values(int, 0, SEEDS - 1)] = _key(
        0, "seed for initialisation, data order and dropout"
    )
    init_from: TextOrNone = _key(
        None, "for `finetune`: the workdir of the run whose model is tuned"
    )
    init_step: CountOrNone = _key(
        None, "for `finetune`: the step of that run's checkpoint. `None`: the newest"
    )
