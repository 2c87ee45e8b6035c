"""`config.train`: the steps, their batches, and what happens between them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.config.keys.key import (
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
from t5x_diffeq.config.keys.values import INT32, PLUGIN, STEP_RANGE, STEPS, Values

_key = partial(key, finetune=True)


@dataclass(frozen=True)
class TrainKeys(Section):
    """`config.train`: the steps, their batches, and what happens between them."""

    section = "train"
    total_steps: Size = _key(2000, "number of optimizer steps", resume=True)
    batch_size: Size = _key(16, "sequences per optimizer step, over all devices")
    trainable: Annotated[
        tuple[str, ...],
        Values(tuple, choices=("source", "adapters", "embeddings", "head", "final_norm")),
    ] = _key(
        (),
        """the parts of the model to train: `source` (what W(t) or the layers' weights are
        made of), `adapters`, `embeddings`, `head`, `final_norm`. `()`: all of them""",
    )
    depths: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 1, STEPS))] = _key(
        (),
        """the numbers of solver steps that training draws from; one that is given twice is
        drawn twice as often. The model then works at these and between them ([Depth as a
        dial](depth.md)). `()`: `model.num_steps` only""",
        branch=True,
    )
    depths_per_step: Size = _key(
        1,
        "how many of `train.depths` an optimizer step uses. It takes the mean of their losses",
        branch=True,
    )
    depths_rows: Annotated[str, one_of("all", "every:k", "parts")] = _key(
        "all",
        """which sequences each of these depths reads. `all`: all of them. `every:k`: the
        largest depth reads all, the others every k-th. `parts`: each reads a part of its
        own""",
        branch=True,
    )
    depths_distill: Fraction = _key(
        0.0,
        """w: the smaller depths of an optimizer step learn (1 - w) cross entropy + w
        KL(largest || smaller)""",
        branch=True,
    )
    depths_until: Fraction = _key(
        1.0, "fraction of the run after which only `model.num_steps` is used", branch=True
    )
    distill_from: TextOrNone = _key(
        None,
        """the workdir of the teacher, a run with the same tokenizer whose predictions the
        model learns. `None`: no teacher""",
    )
    distill_step: CountOrNone = _key(
        None, "the step of the teacher's checkpoint. `None`: the newest at each start"
    )
    distill_weight: Fraction = _key(
        0.5, "w: the loss is (1 - w) cross entropy + w KL(teacher || model)"
    )
    microbatches: Size = _key(
        1, "number of microbatches per optimizer step, computed one after the other", resume=True
    )
    eval_batch_size: Size = _key(
        32, "sequences per evaluation batch, over all devices", resume=True
    )
    eval_batches: SizeOrNone = _key(
        None, "batches per evaluation. `None`: the whole validation split", resume=True
    )
    eval_all_at_end: Switch = _key(
        False,
        """whether the last evaluation takes the whole validation split, whatever
        `train.eval_batches` is""",
        resume=True,
    )
    eval_averages: Switch = _key(
        False, "whether the averages of `train.ema_decay` are evaluated, too", resume=True
    )
    loss_chunk: SizeOrNone = _key(
        None,
        """tokens per device whose logits are in memory at once. `None`: 2048, or on GPUs and TPUs
        the power of two above whose logits take up to a 64th of the device's memory""",
        resume=True,
    )
    velocity_penalty: NotNegative = _key(
        0.0,
        """coefficient of the velocity penalty, the mean square of F(y; W(t)) over depth,
        width and the tokens that have a loss""",
        branch=True,
    )
    z_loss: NotNegative = _key(
        0.0, "coefficient of the z-loss, the squared log of the softmax's normaliser", branch=True
    )
    ema_decay: BelowOne = _key(
        0.0,
        """decay of exponential moving averages of the parameters, such as 0.999; smaller in
        the first steps. `evaluate`, `generate` and `export` use the averages with
        `--averages`. `0`: no averages""",
        resume=True,
    )
    on_spike: Annotated[str, one_of("nothing", "skip", "rollback")] = _key(
        "nothing",
        """what happens if the loss or gradient norm of a step is far above those before, or
        not finite. `nothing`: a value that isn't finite ends the run. `skip`: the step's
        update is left out. `rollback`: the update is left out, and the run goes back to its
        last checkpoint and continues with the data after that step""",
        resume=True,
    )
    spike_deviations: Positive = _key(
        8.0,
        """a step is a spike if it lies more than this many robust standard deviations above
        the median""",
        resume=True,
    )
    spike_window: Annotated[int, Values(int, 8, 2**16)] = _key(
        128, "number of recent steps that the median is taken over"
    )
    log_every: Size = _key(20, "optimizer steps between reports", resume=True)
    hooks: Annotated[tuple[str, ...], Values(tuple, choices=(PLUGIN,))] = _key(
        (),
        """importable names of hooks of your own, such as `package.module:Name` or
        `package.module:Name(every=100)` ([Extending](extending.md))""",
        resume=True,
    )
    trackers: Annotated[tuple[str, ...], Values(tuple, choices=("tensorboard", "wandb"))] = _key(
        ("tensorboard",),
        """where reports go besides `metrics.jsonl`: `tensorboard`, `wandb` (Weights &
        Biases), or both ([Trackers](operating.md#trackers)). `()`: nowhere""",
        resume=True,
    )
    sample_every: SizeOrNone = _key(
        None,
        """optimizer steps between samples of text, which go to `samples.jsonl` and the
        trackers. `None`: no samples""",
        resume=True,
    )
    sample_prompts: Annotated[
        tuple[str, ...], Values(tuple, entry=Values(str, can_be_empty=True))
    ] = _key(("",), 'the texts that samples continue. `""` begins a document', resume=True)
    figure_every: SizeOrNone = _key(
        None,
        """optimizer steps between figures of the weights (the path of W(t), and spectra),
        which go to the trackers. `None`: no figures""",
        resume=True,
    )
    eval_every: Size = _key(500, "optimizer steps between evaluations", resume=True)
    checkpoint_every: Size = _key(500, "optimizer steps between checkpoints", resume=True)
    keep_checkpoints: Size = _key(
        3, "number of newest checkpoints to keep. The next three keys keep others, too", resume=True
    )
    keep_every: SizeOrNone = _key(
        None,
        "also keep each checkpoint whose step is a multiple of this. `None`: no others",
        resume=True,
    )
    keep_best: Count = _key(
        0,
        """also keep this many checkpoints with the lowest `eval/loss`. Only a checkpoint
        whose step is evaluated has one, so let `train.checkpoint_every` be a multiple of
        `train.eval_every`""",
        resume=True,
    )
    milestones: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 1, INT32))] = _key(
        (),
        """steps that are saved in any case and never deleted, even if this key changes.
        Their checkpoints get a file `MILESTONE`, which you may also add or remove by hand""",
        resume=True,
    )
    local_checkpoints: TextOrNone = _key(
        None,
        """a folder on a local disk or in memory, such as `/dev/shm/checkpoints`, for
        frequent checkpoints beside those of the workdir. `None`: no local checkpoints""",
        resume=True,
    )
    local_checkpoint_every: Size = _key(
        50, "optimizer steps between local checkpoints. The newest two are kept", resume=True
    )
    verify_checkpoints: Switch = _key(
        True, "whether a checkpoint's checksums are compared before it is restored", resume=True
    )
    watch_every: SizeOrNone = _key(
        None,
        """optimizer steps between measurements inside the model: norms of gradient, weights
        and update of each layer over depth, and sizes of f, g and the state ([Operating a
        run](operating.md#what-is-inside-the-model)). `None`: no measurements""",
        resume=True,
    )
    profile: Annotated[str | None, Values(str, choices=(STEP_RANGE,), optional=True)] = _key(
        None,
        """the first and the last optimizer step to trace, such as `100:105`. `None`: no
        trace. A run in progress also traces a few steps when a file `profile` appears in
        its workdir""",
        resume=True,
    )
    profile_processes: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 0, INT32))] = (
        _key((0,), "the indices of the processes that trace", resume=True)
    )
    hang_timeout: Seconds = _key(
        1800.0,
        """seconds that an optimizer step may take, without compilation. After that the run
        ends with status 175, after which launchers restart it""",
        resume=True,
    )
    compile_timeout: Seconds = _key(
        7200.0, "seconds that compiling the steps may take; then as above", resume=True
    )
    eval_timeout: Seconds = _key(
        43200.0,
        """seconds that a hook may take each time it runs, such as an evaluation or the
        tasks; then as above""",
        resume=True,
    )
    save_timeout: Seconds = _key(
        7200.0, "seconds that saving or restoring a checkpoint may take; then as above", resume=True
    )
