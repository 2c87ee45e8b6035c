"""`config.train`: the steps, their batches, and what happens between them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.runtime.keys.key import (
    BelowOne,
    Count,
    CountOrNone,
    Fraction,
    NotNegative,
    Positive,
    Seconds,
    Section,
    Size,
    SizeOrNone,
    Switch,
    TextOrNone,
    key,
    one_of,
)
from t5x_diffeq.runtime.keys.values import INT32, PLUGIN, STEP_RANGE, STEPS, Values

_key = partial(key, finetune=True)


@dataclass(frozen=True)
class TrainKeys(Section):
    """`config.train`: the steps, their batches, and what happens between them."""

    section = "train"
    total_steps: Size = _key(2000, "optimizer steps", resume=True)
    batch_size: Size = _key(16, "sequences per step, over all devices")
    trainable: Annotated[
        tuple[str, ...],
        Values(tuple, choices=("source", "adapters", "embeddings", "head", "final_norm")),
    ] = _key(
        (),
        """the parts of the model to train: source, adapters, embeddings, head, final_norm; (): all
        of them""",
    )
    depths: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 1, STEPS))] = _key(
        (),
        """the numbers of solver steps that training draws from (repeat one to draw it more often);
        the model then works at these and between them. (): only model.num_steps""",
        branch=True,
    )
    depths_per_step: Size = _key(
        1, "how many of them one training step uses; it takes their mean loss", branch=True
    )
    depths_rows: Annotated[str, one_of("all", "every:k", "parts")] = _key(
        "all",
        """the sequences that each of them reads | every:k: the largest all, the others every k-th |
        parts: each a part of its own""",
        branch=True,
    )
    depths_distill: Fraction = _key(
        0.0,
        """w: the loss of the smaller ones of a step is (1 - w) cross entropy + w KL(largest ||
        smaller)""",
        branch=True,
    )
    depths_until: Fraction = _key(
        1.0, "the fraction of the run after which only model.num_steps is used", branch=True
    )
    distill_from: TextOrNone = _key(
        None,
        """the teacher: the workdir of a run with the same tokenizer, whose predictions the model
        learns; None: no teacher""",
    )
    distill_step: CountOrNone = _key(
        None, "the teacher's checkpoint; None: the newest, which is looked up at each start"
    )
    distill_weight: Fraction = _key(
        0.5, "w: the loss is (1 - w) cross entropy + w KL(teacher || model)"
    )
    microbatches: Size = _key(1, "number of sequential microbatches per step", resume=True)
    eval_batch_size: Size = _key(
        32, "sequences per evaluation batch, over all devices", resume=True
    )
    eval_batches: SizeOrNone = _key(
        None, "batches per evaluation; None: the whole split", resume=True
    )
    eval_all_at_end: Switch = _key(
        False, "whether the last evaluation takes the whole split anyway", resume=True
    )
    eval_averages: Switch = _key(
        False, "whether the averages of train.ema_decay are evaluated, too", resume=True
    )
    loss_chunk: Size = _key(
        2048, "tokens per device whose logits are in memory at once", resume=True
    )
    velocity_penalty: NotNegative = _key(
        0.0,
        """coefficient of the mean square of the velocity F(y; W(t)) over depth, width and the
        tokens that have a loss""",
        branch=True,
    )
    z_loss: NotNegative = _key(
        0.0, "coefficient of the squared log of the softmax's normaliser in the loss", branch=True
    )
    ema_decay: BelowOne = _key(
        0.0,
        """of exponential moving averages of the parameters, such as 0.999, for `evaluate`,
        `generate` and `export` --averages; smaller in the first steps; 0: none""",
        resume=True,
    )
    on_spike: Annotated[str, one_of("nothing", "skip", "rollback")] = _key(
        "nothing",
        """what happens if the loss or the gradient norm of a step is far above those of the steps
        before, or not finite | skip: its update is left out | rollback: the run goes back to its
        last checkpoint and on with the data after that step. With nothing, a loss or norm that
        isn't finite ends the run""",
        resume=True,
    )
    spike_deviations: Positive = _key(
        8.0, "k: a spike is more than k robust standard deviations above the median", resume=True
    )
    spike_window: Annotated[int, Values(int, 8, 2**16)] = _key(
        128, "of the loss, or of the gradient norm, of this many steps"
    )
    log_every: Size = _key(20, "steps between reports", resume=True)
    hooks: Annotated[tuple[str, ...], Values(tuple, choices=(PLUGIN,))] = _key(
        (),
        """importable names of what the loop does beside its steps, such as "package.module:Name" or
        "package.module:Name(every=100)" (t5x_diffeq/blocks/README.md)""",
        resume=True,
    )
    trackers: Annotated[tuple[str, ...], Values(tuple, choices=("tensorboard", "wandb"))] = _key(
        ("tensorboard",),
        """where reports go besides metrics.jsonl: tensorboard, wandb (Weights & Biases), or both
        (t5x_diffeq/tracking/README.md)""",
        resume=True,
    )
    sample_every: SizeOrNone = _key(
        None,
        """steps between samples of text, which go to samples.jsonl and the trackers; None: no
        samples""",
        resume=True,
    )
    sample_prompts: Annotated[
        tuple[str, ...], Values(tuple, entry=Values(str, can_be_empty=True))
    ] = _key(("",), 'the texts that samples continue; "" begins a document', resume=True)
    figure_every: SizeOrNone = _key(
        None,
        """steps between figures of the weights, which go to the trackers: the path of W(t), and
        spectra; None: no figures""",
        resume=True,
    )
    eval_every: Size = _key(500, "steps between evaluations", resume=True)
    checkpoint_every: Size = _key(500, "steps between checkpoints", resume=True)
    keep_checkpoints: Size = _key(
        3, "newest checkpoints to keep; the next three keys keep others too", resume=True
    )
    keep_every: SizeOrNone = _key(
        None, "keep each checkpoint whose step is a multiple of this", resume=True
    )
    keep_best: Count = _key(
        0,
        """keep this many with the lowest eval/loss; a checkpoint has one if its step is evaluated,
        as with a checkpoint_every that is a multiple of eval_every""",
        resume=True,
    )
    milestones: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 1, INT32))] = _key(
        (),
        """steps that are saved in any case and never deleted, even if the key changes: their
        checkpoints get a file MILESTONE, which can be added and removed by hand""",
        resume=True,
    )
    local_checkpoints: TextOrNone = _key(
        None,
        """a folder on a local disk or in memory, such as /dev/shm/checkpoints, for frequent
        checkpoints beside those of the workdir; None: none""",
        resume=True,
    )
    local_checkpoint_every: Size = _key(
        50, "steps between them; the newest two are kept", resume=True
    )
    verify_checkpoints: Switch = _key(
        True, "compare a checkpoint's checksums before it is restored", resume=True
    )
    watch_every: SizeOrNone = _key(
        None,
        """steps between looks inside the model: norms of gradient, weights and update of each
        generated layer over depth, sizes of f, g and state; None: none""",
        resume=True,
    )
    profile: Annotated[str | None, Values(str, choices=(STEP_RANGE,), optional=True)] = _key(
        None,
        """the optimizer steps to trace, first and last: "100:105"; None: none. A run in progress
        traces a few when a file `profile` appears in its workdir""",
        resume=True,
    )
    profile_processes: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 0, INT32))] = (
        _key((0,), "the processes that trace", resume=True)
    )
    hang_timeout: Seconds = _key(
        1800.0,
        """seconds that a step may take, without compilation; after that the run ends with status
        175, and launch/ starts it again""",
        resume=True,
    )
    compile_timeout: Seconds = _key(7200.0, "likewise for compiling the steps", resume=True)
    eval_timeout: Seconds = _key(
        43200.0, "likewise for each run of a hook, such as an evaluation or the tasks", resume=True
    )
    save_timeout: Seconds = _key(
        7200.0, "likewise for saving or restoring a checkpoint", resume=True
    )
