"""`config.train`: the steps, their batches, and what happens between them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.config.keys import values
from t5x_diffeq.config.keys.values import INT32, PLUGIN, Section, Values, key, one_of, reads_as_data

_key = partial(key, finetune=True)


@dataclass(frozen=True)
class TrainKeys(Section):
    """`config.train`: the steps, their batches, and what happens between them."""

    section = "train"
    total_steps: values.Size = _key(2000, resume=True)
    """number of optimizer steps"""
    batch_size: values.Size = _key(16)
    """sequences per optimizer step, over all devices"""
    trainable: Annotated[
        tuple[str, ...],
        Values(tuple, choices=("source", "adapters", "embeddings", "head", "final_norm")),
    ] = _key(())
    """the parts of the model to train: `source` (what W(t) or the layers' weights are made of),
    `adapters`, `embeddings`, `head`, `final_norm`. `()`: all of them"""
    depths: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 1, values.STEPS))] = _key(
        (), branch=True
    )
    """the numbers of solver steps from which training chooses at random. A number that is given
    twice is chosen twice as often. The model then works with these numbers and with those between
    them ([Changing the number of steps](depth.md)). `()`: `model.num_steps` only"""
    depths_per_step: values.Size = _key(1, branch=True)
    """how many of `train.depths` an optimizer step uses. It takes the mean of their losses"""
    depths_rows: Annotated[str, one_of("all", "every:k", "parts")] = _key("all", branch=True)
    """which sequences each of these depths reads. `all`: all of them. `every:k`: the largest depth
    reads all, the others every k-th. `parts`: each reads a separate part"""
    depths_distill: values.Fraction = _key(0.0, branch=True)
    """w: the smaller depths of an optimizer step have the loss (1 - w) cross entropy + w KL(largest
    || smaller)"""
    depths_until: values.Fraction = _key(1.0, branch=True)
    """fraction of the run after which only `model.num_steps` is used"""
    distill_from: values.TextOrNone = _key(None, asks=reads_as_data)
    """the workdir of the teacher, a run with the same tokenizer whose predictions the model learns.
    `None`: no teacher"""
    distill_step: values.CountOrNone = _key(None)
    """the step of the teacher's checkpoint. `None`: the newest at each start"""
    distill_weight: values.Fraction = _key(0.5)
    """w: the loss is (1 - w) cross entropy + w KL(teacher || model)"""
    microbatches: values.Size = _key(1, resume=True)
    """number of microbatches per optimizer step, computed one after the other"""
    eval_batch_size: values.Size = _key(32, resume=True)
    """sequences per evaluation batch, over all devices"""
    eval_batches: values.SizeOrNone = _key(None, resume=True)
    """batches per evaluation. `None`: the whole validation split"""
    eval_all_at_end: values.Switch = _key(False, resume=True)
    """whether the last evaluation takes the whole validation split, for any `train.eval_batches`"""
    eval_averages: values.Switch = _key(False, resume=True)
    """whether the averages of `train.ema_decay` are also evaluated"""
    loss_chunk: values.SizeOrNone = _key(None, resume=True)
    """tokens per device whose logits are in memory at once. `None`: 2048, or on GPUs and TPUs the
    largest power of two from 2048 on whose logits take at most a 64th of the device's memory"""
    velocity_penalty: values.NotNegative = _key(0.0, branch=True)
    """coefficient of the velocity penalty, the mean square of F(y; W(t)) over depth, width and the
    tokens that have a loss"""
    z_loss: values.NotNegative = _key(0.0, branch=True)
    """coefficient of the z-loss, the squared log of the softmax's normaliser"""
    terms: Annotated[tuple[str, ...], Values(tuple, choices=(PLUGIN,))] = _key((), branch=True)
    """importable names of your own terms of what is minimised, such as
    `package.module:Entropy(weight=0.1)` ([Extending](extending.md#terms))"""
    ema_decay: values.BelowOne = _key(0.0, resume=True)
    """decay of exponential moving averages of the parameters, such as 0.999. The decay is smaller
    in the first steps. `evaluate`, `generate` and `export` use the averages with `--averages`. `0`:
    no averages"""
    on_spike: Annotated[str, one_of("nothing", "skip", "rollback")] = _key("nothing", resume=True)
    """what happens if the loss or the gradient norm of a step is far above those of earlier steps,
    or not finite. `nothing`: a value that isn't finite ends the run. `skip`: the step's update is
    left out. `rollback`: the update is left out, and the run goes back to its last checkpoint and
    continues with the data after the spike"""
    spike_deviations: values.Positive = _key(8.0, resume=True)
    """a step is a spike if it lies more than this many robust standard deviations above the
    median"""
    spike_window: Annotated[int, Values(int, 8, 2**16)] = _key(128)
    """number of recent steps that the median is taken over"""
    log_every: values.Size = _key(20, resume=True)
    """optimizer steps between reports"""
    hooks: Annotated[tuple[str, ...], Values(tuple, choices=(PLUGIN,))] = _key((), resume=True)
    """importable names of your own hooks, such as `package.module:Name` or
    `package.module:Name(every=100)` ([Extending](extending.md))"""
    trackers: Annotated[tuple[str, ...], Values(tuple, choices=("tensorboard", "wandb"))] = _key(
        ("tensorboard",), resume=True
    )
    """where reports go besides `metrics.jsonl`: `tensorboard`, `wandb` (Weights & Biases), or both
    ([Trackers](operating.md#trackers)). `()`: nowhere"""
    sample_every: values.SizeOrNone = _key(None, resume=True)
    """optimizer steps between samples of text, which go to `samples.jsonl` and the trackers.
    `None`: no samples"""
    sample_prompts: Annotated[
        tuple[str, ...], Values(tuple, entry=Values(str, can_be_empty=True))
    ] = _key(("",), resume=True, asks=reads_as_data)
    """the texts that samples continue. `""` begins a document"""
    figure_every: values.SizeOrNone = _key(None, resume=True)
    """optimizer steps between figures of the weights (the path of W(t), and spectra), which go to
    the trackers. `None`: no figures"""
    eval_every: values.Size = _key(500, resume=True)
    """optimizer steps between evaluations"""
    checkpoint_every: values.Size = _key(500, resume=True)
    """optimizer steps between checkpoints"""
    keep_checkpoints: values.Size = _key(3, resume=True)
    """number of newest checkpoints to keep. The next three keys keep others, too"""
    keep_every: values.SizeOrNone = _key(None, resume=True)
    """also keep each checkpoint whose step is a multiple of this. `None`: no others"""
    keep_best: values.Count = _key(0, resume=True)
    """also keep this many checkpoints with the lowest `eval/loss`. Only a checkpoint whose step is
    evaluated has a loss, so make `train.checkpoint_every` a multiple of `train.eval_every`"""
    milestones: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 1, INT32))] = _key(
        (), resume=True
    )
    """steps whose checkpoints are always saved and never deleted, even if this key changes. The
    checkpoints get a file `MILESTONE`, which you may also add or remove by hand"""
    verify_checkpoints: values.Switch = _key(True, resume=True)
    """whether a checkpoint's checksums are compared before it is restored"""
    watch_every: values.SizeOrNone = _key(None, resume=True)
    """optimizer steps between measurements inside the model: norms of gradient, weights and update
    of each layer over depth, and sizes of f, g and the state ([Operating a
    run](operating.md#what-is-inside-the-model)). `None`: no measurements"""
    profile: Annotated[str | None, Values(str, choices=(values.STEP_RANGE,), optional=True)] = _key(
        None, resume=True
    )
    """the first and the last optimizer step to trace, such as `100:105`. `None`: no trace. A run in
    progress also traces a few steps when a file `profile` appears in its workdir"""
    profile_processes: Annotated[tuple[int, ...], Values(tuple, entry=Values(int, 0, INT32))] = (
        _key((0,), resume=True)
    )
    """the indices of the processes that trace"""
    hang_timeout: values.Seconds = _key(1800.0, resume=True)
    """seconds that an optimizer step may take, without compilation. After that, the run ends with
    status 175, and launchers restart it"""
    compile_timeout: values.Seconds = _key(7200.0, resume=True)
    """seconds that compiling the steps may take. After that, the run ends as for
    `train.hang_timeout`"""
    eval_timeout: values.Seconds = _key(43200.0, resume=True)
    """seconds that a hook may take each time it runs, such as an evaluation. After that, the run
    ends as for `train.hang_timeout`"""
    save_timeout: values.Seconds = _key(7200.0, resume=True)
    """seconds that saving or restoring a checkpoint may take. After that, the run ends as for
    `train.hang_timeout`"""
