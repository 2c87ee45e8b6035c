"""The checks before a run begins: one ordered list, from which each verb runs its own rows.

Other checks stand elsewhere: a single key is checked with its section (`config/keys/`), a model and
its mesh where a `Setup` is made, and the data where it is prepared.
"""

from collections.abc import Callable, Collection
from math import lcm
from typing import NamedTuple

import jax

from t5x_diffeq.checkpoints.restoring import find_step
from t5x_diffeq.config.config import KEYS, Config
from t5x_diffeq.data.corpus import check_tokenizers
from t5x_diffeq.data.named_source import check_paths, part_configs
from t5x_diffeq.data.sources import STREAM
from t5x_diffeq.data.tokenizer_folder import tokenizer_of_run
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import parse_path
from t5x_diffeq.training.load import PretrainedRun
from t5x_diffeq.training.setup import check_fits
from t5x_diffeq.training.teacher import check_teacher, check_teachers_tokenizer
from t5x_diffeq.training.term_checks import check_terms
from t5x_diffeq.training.terms import states_terms
from t5x_diffeq.training.tracking.trackers import check_trackers

# ------------------------------------------------------------------------------ the model's keys


def _check_unroll(config: Config) -> None:
    unroll, num_steps = config.model.scan_unroll, config.model.num_steps
    if (unroll or 1) > num_steps:
        raise InputError(
            f"model.scan_unroll={unroll} is more than model.num_steps={num_steps}; give at most "
            f"{num_steps}"
        )


def _check_precision(_: Config) -> None:
    """Checks that JAX computes in 32 bits, which the programs of a training are made for."""
    if jax.dtypes.canonicalize_dtype("float64") == "float64":
        raise InputError(
            "JAX computes in 64 bits (JAX_ENABLE_X64, or jax_enable_x64 in jax.config), and trains "
            "in 32; unset that"
        )


def _check_integrals(config: Config) -> None:
    """Checks that the scheme solves the equation if a loss term is an integral along a solution."""
    scheme = config.model.scheme
    integrals = [term.name for term in states_terms(config.train)]
    if integrals and find_scheme(scheme).order is None:
        raise InputError(
            f"{', '.join(integrals)}: a term of the states is an integral along a solution of "
            f"dy/dt = f + g, and a step of model.scheme={scheme} isn't one of a solver (its "
            "order is None); set train.velocity_penalty=0, and leave such terms out of train.terms"
        )


def _check_adapters(config: Config) -> None:
    model = config.model
    if model.adapter_rank > model.embed_dim:
        raise InputError(
            f"model.adapter_rank={model.adapter_rank} is more than model.embed_dim="
            f"{model.embed_dim}, the rank that a kernel can have; lower it"
        )


# ------------------------------------------------------------------------------ keys in pairs

_NEEDS = {  # keys that do nothing without another key
    "init_step": "init_from",
    "train.depths_per_step": "train.depths",
    "train.depths_until": "train.depths",
    "train.eval_averages": "train.ema_decay",
    "train.sample_prompts": "train.sample_every",
    "train.distill_step": "train.distill_from",
    "train.distill_weight": "train.distill_from",
}


def _check_needed(config: Config) -> None:
    """Checks that no key is set without the other key that it needs."""
    values = config.flat()
    for key, needed in _NEEDS.items():
        if values[key] != KEYS[key].default and not values[needed]:
            raise InputError(
                f"{key}={values[key]} does nothing without {needed}; set {needed}, or leave {key} "
                "out"
            )


def _check_kept(config: Config) -> None:
    """Checks that `keep_every` keeps a checkpoint, unless the run is too short for any."""
    train = config.train
    every, keep, total = train.checkpoint_every, train.keep_every, train.total_steps
    if keep is None or max(every, keep) > total or total % keep == 0:  # the last step is saved
        return
    if lcm(every, keep) > total:
        raise InputError(
            f"train.keep_every={keep} keeps none of the checkpoints that train.checkpoint_every="
            f"{every} saves up to train.total_steps={total}; make it a multiple of "
            "train.checkpoint_every"
        )


# ------------------------------------------------------------------------------ several depths


def _check_depths(config: Config) -> None:
    """Checks that `train.depths` can be drawn from, and that the weights exist on such grids."""
    train = config.train
    depths = tuple(train.depths)
    if depths and train.depths_per_step > len(set(depths)):
        raise InputError(
            f"train.depths_per_step is {train.depths_per_step}; it must be from 1 to the "
            f"{len(set(depths))} different numbers in train.depths"
        )
    if depths and not source_of(config.model).any_time:
        raise InputError(
            f"train.depths={depths} needs weights for other numbers of steps, but "
            f"{config.model.weights} weights exist only at their own nodes; set model.weights to "
            "time_dependent or shared"
        )


def _check_depths_reach(config: Config) -> None:
    """Checks that the depth of evaluation isn't outside the depths that are drawn to the end."""
    depths, steps = config.train.depths, config.model.num_steps
    if depths and config.train.depths_until == 1 and not min(depths) <= steps <= max(depths):
        raise InputError(
            f"train.depths={tuple(depths)} never train model.num_steps={steps}, with which the run "
            "is evaluated; set model.num_steps to one of them, or add it to train.depths"
        )


def _check_several_depths(config: Config) -> None:
    """Checks that keys that need several depths in one step have them, and that the keys agree."""
    train = config.train
    several = {
        f"train.depths_rows={train.depths_rows}": train.depths_rows != "all",
        f"train.depths_distill={train.depths_distill}": train.depths_distill > 0,
    }
    for setting, given in several.items():
        if given and (train.depths_per_step < 2 or not train.depths):
            raise InputError(
                f"{setting} needs several depths in one optimizer step; set train.depths, and set "
                "train.depths_per_step to at least 2"
            )
    if train.depths_distill and train.depths_rows == "parts":
        raise InputError(
            f"train.depths_distill={train.depths_distill} with train.depths_rows=parts: the "
            "largest depth doesn't read the rows of the others; take all or every:k"
        )
    if train.depths_distill and train.distill_from:
        raise InputError(
            f"train.depths_distill={train.depths_distill} and train.distill_from="
            f"{train.distill_from}: a depth has one teacher; leave one of them out"
        )


# ------------------------------------------------------------------------------ data, hooks


def _check_data(config: Config) -> None:
    """Checks the mixture and its parts, and what a stream can't do."""
    data = config.data
    parts = part_configs(data)
    if any(part.source == STREAM for part in parts) and data.source != STREAM:
        raise InputError(
            f"data.mixture has a part with the source {STREAM}, which can't be mixed; tokenise "
            "that part first with prepare_data, and give its source as tokens"
        )
    if data.source == STREAM and data.packing != "concat_then_split":
        raise InputError(
            f"data.packing={data.packing} needs the lengths of all documents, which are unknown "
            f"with data.source={STREAM}; leave it out, or tokenise first with prepare_data"
        )


def _check_profile(config: Config) -> None:
    """Checks that the run takes the steps that are to be profiled."""
    profile, total_steps = config.train.profile, config.train.total_steps
    if profile is not None:
        first, last = map(int, profile.split(":"))
        if not 1 <= first <= last <= total_steps:
            raise InputError(
                f"train.profile={profile}: the first step must be at least 1, the last no "
                f"earlier, and at most train.total_steps={total_steps}; such as 100:105"
            )


def _check_figures(config: Config) -> None:
    train = config.train
    if train.figure_every is not None and not train.trackers:
        raise InputError(
            f"train.figure_every={train.figure_every} needs a tracker that shows figures; set "
            "train.trackers, or leave it out"
        )


# ------------------------------------------------------------------------------ another run


def _check_pretrained(config: Config) -> None:
    """Checks that the run in `init_from` fits the model, and its tokenizer the data."""
    source = parse_path(str(config.init_from), "config.init_from")
    tokenizer = tokenizer_of_run(source, "config.init_from=")
    find_step(source, config.init_step)
    size, length = tokenizer.vocab_size, config.data.sequence_length
    PretrainedRun(source, size).check(ModelConfig.of(config.model, size, length))
    check_tokenizers(config.data, tokenizer)
    check_teachers_tokenizer(config, tokenizer)


# ------------------------------------------------------------------------------ the list

_EVERY = frozenset(("train", "finetune", "benchmark", "plan", "convert", "sweep", "launch"))
_BUT_PLAN = _EVERY - {"plan"}  # plan reads no data and takes no steps
_CONFIG, _SETUP, _CORPUS = 1, 2, 3  # how many of config, setup and corpus a check takes


class Check(NamedTuple):
    """A row of the list."""

    check: Callable[..., None]  # takes what it needs; raises an `InputError`
    verbs: Collection[str] = _EVERY  # the verbs that run it; "launch" is `launch/check_run.py`
    needs: int = _CONFIG  # with _SETUP also the setup, with _CORPUS also the corpus
    of_new_runs: bool = False  # whether a resumed run, which may be older, skips the check


CHECKS = (
    Check(_check_unroll, of_new_runs=True),
    # This check computes on JAX's devices, which a sweep leaves to its runs.
    Check(lambda config: check_terms(config.train), _EVERY - {"sweep"}, of_new_runs=True),
    Check(_check_integrals, of_new_runs=True),
    Check(_check_adapters, of_new_runs=True),
    Check(_check_needed, of_new_runs=True),
    Check(_check_kept, of_new_runs=True),
    Check(lambda config: check_paths(config.data), _BUT_PLAN, of_new_runs=True),
    Check(_check_depths_reach, of_new_runs=True),
    Check(_check_depths),
    Check(_check_several_depths),
    Check(_check_data, _BUT_PLAN),
    Check(_check_profile, _BUT_PLAN),
    Check(_check_figures, _BUT_PLAN),
    Check(_check_precision, ("train", "finetune", "benchmark")),
    # These read the files of other runs, and look for packages.
    Check(check_teacher, ("train", "finetune")),
    Check(_check_pretrained, ("finetune",)),
    Check(lambda config: check_trackers(config.train.trackers), ("train",)),
    Check(lambda _, setup: check_fits(setup), ("train", "benchmark"), _SETUP),
    Check(
        lambda config, _, corpus: check_teachers_tokenizer(config, corpus.tokenizer),
        ("train",),
        _CORPUS,
    ),
)


def run_checks(verb: str, *known: object, new: bool = True) -> None:
    """Runs those rows of a verb, in their order, that need exactly what is `known`.

    A verb calls this with the config; then, if it makes a setup, with the config and the setup; and
    at last, if it prepares a corpus, with the config, the setup and the corpus. `new` says whether
    the run is new.
    """
    for row in CHECKS:
        if row.needs == len(known) and verb in row.verbs and (new or not row.of_new_runs):
            row.check(*known)
