"""Checks that the keys of a config can be used together, and on a mesh; no data is read.

What concerns one key alone is checked with its section (`config/keys/`), and what concerns the
files of others with what reads them.
"""

from jax.sharding import Mesh

from t5x_diffeq.config.config import Config, DataKeys, TrainKeys
from t5x_diffeq.data.named_source import check_paths, part_configs
from t5x_diffeq.data.sources import STREAM
from t5x_diffeq.model.block import can_split_length
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import make_block
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import partitioning
from t5x_diffeq.training.depths import least_rows
from t5x_diffeq.training.term_checks import check_terms
from t5x_diffeq.training.terms import states_terms


def check_combinations(config: Config, new: bool = True) -> None:
    """Checks that the keys don't contradict each other; whatever makes or times a run calls it.

    Runs that began before a check existed may continue, so some are for new runs alone.
    """
    if new:
        _check_model(config)
        check_paths(config.data)
    _check_depths(config)
    _check_several_depths(config.train)
    _check_data(config.data)
    _check_hooks(config.train)


# ------------------------------------------------------------------------------ of new runs


def _check_model(config: Config) -> None:
    model = config.model
    if (model.scan_unroll or 1) > model.num_steps:
        raise InputError(
            f"model.scan_unroll={model.scan_unroll} is more than model.num_steps="
            f"{model.num_steps}; give at most {model.num_steps}"
        )
    check_terms(config.train)
    integrals = [term.name for term in states_terms(config.train)]
    if integrals and find_scheme(model.scheme).order is None:
        raise InputError(
            f"{', '.join(integrals)}: a term of the states is an integral along a solution of "
            f"dy/dt = f + g, and a step of model.scheme={model.scheme} isn't one of a solver (its "
            "order is None); set train.velocity_penalty=0, and leave such terms out of train.terms"
        )
    if model.adapter_rank > model.embed_dim:
        raise InputError(
            f"model.adapter_rank={model.adapter_rank} is more than model.embed_dim="
            f"{model.embed_dim}, the rank that a kernel can have; lower it"
        )


# ------------------------------------------------------------------------------ of all runs


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


def _check_several_depths(train: TrainKeys) -> None:
    """Checks what needs several depths in one step, and what those need."""
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


def _check_data(data: DataKeys) -> None:
    """Checks the mixture and its parts, and what a stream can't do."""
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


def _check_hooks(train: TrainKeys) -> None:
    """Checks that the run has the steps to profile, and a tracker that shows its figures."""
    if train.profile is not None:
        first, last = map(int, train.profile.split(":"))
        if not 1 <= first <= last <= train.total_steps:
            raise InputError(
                f"train.profile={train.profile}: the first step must be at least 1, the last no "
                f"earlier, and at most train.total_steps={train.total_steps}; such as 100:105"
            )
    if train.figure_every is not None and not train.trackers:
        raise InputError(
            f"train.figure_every={train.figure_every} needs a tracker that shows figures; set "
            "train.trackers, or leave it out"
        )


# ------------------------------------------------------------------------------ on a mesh


def check_context(model: ModelConfig, mesh: Mesh) -> None:
    """Checks that sequences can be split over `mesh.context`."""
    shards = mesh.shape["context"]
    if shards == 1:
        return
    if not can_split_length(type(make_block(model))):
        raise InputError(
            f"mesh.context={shards} splits sequences, and the block of model.block={model.block} "
            "needs whole ones (it doesn't say `splits_length = True`); set mesh.context=1"
        )
    if model.max_length % (2 * shards):
        raise InputError(
            f"data.sequence_length={model.max_length} is not divisible by {2 * shards}, the number "
            f"of chunks into which mesh.context={shards} cuts a sequence; change one of them"
        )


def check_microbatches(train: TrainKeys, mesh: Mesh) -> None:
    """Checks that every device's rows can be divided into the microbatches."""
    shards = partitioning.batch_shards(mesh.shape)
    where = f"on each of {shards} devices ({partitioning.describe_batch_axes(mesh.shape)})"
    if train.batch_size % (shards * train.microbatches):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by train.microbatches="
            f"{train.microbatches} {where}; change one of them"
        )
    every = least_rows(train.depths_rows, train.depths_per_step) if train.depths else 1
    if train.batch_size % (shards * train.microbatches * every):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {every} (train.depths_rows="
            f"{train.depths_rows}) in each of train.microbatches={train.microbatches} {where}; "
            "change one of them"
        )
