"""Training: a run is prepared, its state restored, its steps compiled; then the loop takes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.restoring import check_continues
from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, TrainState
from t5x_diffeq.checkpoints.workdir import check_config, comparing_failures
from t5x_diffeq.cluster.processes import run_in_turn
from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.cluster.watchdog import Watchdog
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.examples import eval_examples, training_data
from t5x_diffeq.system.chips import GIB
from t5x_diffeq.system.compilation_cache import enable_cache
from t5x_diffeq.system.console import Progress, log
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.training import progress
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.depths import depths_of, depths_to_come
from t5x_diffeq.training.goodput import CHECKPOINT, COMPILE, OTHER, STEPS
from t5x_diffeq.training.history import Clock, History, Stopwatch, check_saves_are_left
from t5x_diffeq.training.hooks.basic_hooks import Saves
from t5x_diffeq.training.hooks.hook import DoneStep, Hook, LoopPosition, PreparedRun, Training
from t5x_diffeq.training.hooks.hook_list import HookClass, Hooks, load_hooks, make_hook, naming_hook
from t5x_diffeq.training.hooks.spike_hook import GoBack, go_back
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.setup import Setup, expected_vocab_size, least_memory, make_setup
from t5x_diffeq.training.step import TrainStep, compile_train_steps
from t5x_diffeq.training.teacher import load_teacher
from t5x_diffeq.training.tracking.jsonl import kinds_reported_at
from t5x_diffeq.training.tracking.trackers import open_writer


def train(
    config: Config,
    workdir: AnyPath,
    verb_hooks: Sequence[type[Hook]],
    make_state: Callable[[Setup], TrainState] = Setup.init_state,
) -> int:
    """Trains to `config.train.total_steps`; returns the exit status: 0; 42 or 130 if stopped.

    Args:
      config: the run's config.
      workdir: a new workdir, or one whose run is resumed.
      verb_hooks: the hooks of every run.
      make_state: makes the train state of a run that has none yet.

    Raises:
      InputError: if the config or data is invalid; detected before training starts.
      RunError: if the run fails.
    """
    stopwatch, total_steps = Stopwatch(), config.train.total_steps
    run, hook_classes = _prepare(config, workdir, verb_hooks)
    setup = run.setup
    with setup.context(), StopSignals() as stop, ExitStack() as stack:
        training, trackers_end = _open(run, stopwatch, stop, stack)
        programs = enable_cache()

        # Restore. From here on, a failure is compared with the failure of the attempt before.
        restored = _restore(training)
        stack.enter_context(comparing_failures(workdir, training.start))

        # Compile in a thread, while the state is made and evaluated. On a GPU nothing may run
        # meanwhile: XLA chooses its kernels by their times.
        # A rollback may go back to any step.
        earliest = 0 if config.train.on_spike == "rollback" else training.start
        depths = depths_to_come(config, earliest) if training.start < total_steps else []
        teacher = load_teacher(setup)
        thread = stack.enter_context(ThreadPoolExecutor(1, "compile"))
        compiling = thread.submit(
            compile_train_steps, setup, config.train.batch_size, depths, teacher
        )
        if setup.mesh.devices.flat[0].platform == "gpu":
            _wait_for(compiling, training, depths)
        making = "making the train state"
        with Progress(making), training.watchdog.limit(making, config.train.save_timeout):
            first = restored or RestoredCheckpoint(make_state(setup))
            first = first._replace(state=setup.complete(first.state))
        progress.write_overview(setup.abstract_state.params, workdir)
        progress.log_account(config, setup, run.corpus, run.data, workdir, training.start)

        # Begin: the history and the trackers, and then the hooks, which write to both.
        hooks = Hooks(training, [make_hook(each, training) for each in hook_classes])
        due = hooks.due_at_start(kinds_reported_at(workdir, training.start))
        if training.start > total_steps or (training.start == total_steps and not due):
            log(f"already finished: {training.start} of {total_steps} steps are done")
            progress.log_next_commands(workdir)
            return 0
        training.history.start(training.start, total_steps)
        training.writer = trackers_end.enter_context(
            open_writer(workdir, training.start, config.train.trackers, first.facts.reports)
        )
        training.writer.write_hparams(progress.hyperparameters(setup))
        trackers_end.callback(lambda: stopwatch.turn_to(OTHER))
        stack.enter_context(hooks)
        hooks.restore(first.facts.hooks)
        at, batches = LoopPosition.at(first), _batches_after(training, first)
        stopped = not hooks.run(due, at)

        # Loop.
        if depths and not stopped:
            train_steps, seconds = _wait_for(compiling, training, depths)
            progress.log_ready(depths, sum(stopwatch.seconds().values()), seconds, programs)
            teacher_params = (teacher.params,) if teacher else ()
            at, stopped = _loop(training, hooks, at, batches, train_steps, teacher_params)
        stopwatch.turn_to(CHECKPOINT)
        training.watchdog.expect("saving the last checkpoint", config.train.save_timeout)

    # Every context has ended, so all is saved.
    if stopped:
        assert stop.reason is not None
        progress.log_stopped(stop.reason.name, at.step)
        return stop.reason.status
    progress.log_summary(workdir, sum(stopwatch.seconds().values()))
    return 0


def _loop(
    training: Training,
    hooks: Hooks,
    at: LoopPosition,
    batches: Iterator[Batch],
    train_steps: Mapping[tuple[int, ...], TrainStep],
    teacher_params: tuple[dict, ...],
) -> tuple[LoopPosition, bool]:
    """Takes the steps that are left; returns where the loop ends, and whether it was stopped."""
    config, clock = training.config, training.clock
    training.watchdog.expect(f"step {at.step + 1}", config.train.hang_timeout)
    training.stopwatch.turn_to(STEPS)
    in_flight: DoneStep | None = None
    stopping = False
    while at.step < config.train.total_steps and not stopping:
        step = at.step + 1
        hooks.before_batch(step, at.state)
        with clock.waiting_for_data(in_flight and in_flight.metrics):
            batch = next(batches)
        hooks.before_step(step, at.state, batch)
        train_step = train_steps[depths_of(config, step)]
        state, metrics = train_step(at.state, batch, *teacher_params)
        at = LoopPosition(step, state, at.batches_consumed + 1)
        hooks.after_step(step, state, metrics)
        done, in_flight = [in_flight], DoneStep(step, batch, metrics, at.batches_consumed)
        stopping = training.stop.should_stop()
        due = [] if stopping else hooks.due(step)
        # The step before is reported while this step runs. If the state is used next, this step is
        # reported first.
        if due or stopping:
            done, in_flight = [*done, in_flight], None
        try:
            for each in filter(None, done):
                hooks.report(each)
        except GoBack as error:
            checkpoint, in_flight = go_back(training, hooks, error.spike, state), None
            at, batches = LoopPosition.at(checkpoint), _batches_after(training, checkpoint)
            continue
        stopping = not hooks.run(due, at) or stopping
        if stopping:
            hooks.stop(at)
    return at, stopping


def _batches_after(training: Training, at: RestoredCheckpoint) -> Iterator[Batch]:
    return training.data.batches(
        training.setup.batch_sharding, at.batches_consumed, at.facts.position
    )


# ------------------------------------------------------------------------------ before the loop


def _prepare(
    config: Config, workdir: AnyPath, verb_hooks: Sequence[type[Hook]]
) -> tuple[PreparedRun, list[HookClass]]:
    """Checks the config, and prepares the data and the examples to evaluate on.

    Checks that take longer come later. Also returns the hooks: the hooks of `train.hooks` follow
    the verb's, and `Saves` is last, because a checkpoint comes after all reports of its step.
    """
    new = check_config(config, workdir)  # first, because it trusts the config's plug-ins
    if not new:
        check_continues(workdir)
        check_saves_are_left(workdir)
    run_checks("train", config, new=new)
    hooks = [HookClass(cls, cls) for cls in verb_hooks]
    hooks += [
        *load_hooks(config.train.hooks, [each.name for each in verb_hooks]),
        HookClass(Saves, Saves),
    ]
    setup = make_setup(config, expected_vocab_size(config))
    run_checks("train", config, setup)  # before the data, which may take hours to prepare
    for hook in hooks:
        with naming_hook(hook.cls):
            hook.cls.check(config, setup)
    stated, tuned = config.model.vocab_size, bool(config.init_from)
    corpus = run_in_turn(
        lambda first: prepare_corpus(config.data, workdir, new and first, stated, tuned),
        "the data is prepared",
    )
    # A tokenizer's file has its own size, and a short text trains fewer tokens than asked for.
    if corpus.tokenizer.vocab_size != setup.model.config.vocab_size:
        setup = make_setup(config, corpus.tokenizer.vocab_size)
    run_checks("train", config, setup, corpus)
    data, eval_parts = training_data(config, corpus), eval_examples(config.data, corpus)
    for hook in hooks:
        with naming_hook(hook.cls):
            hook.cls.check_corpus(config, setup, corpus)
    return PreparedRun(config, setup, workdir, corpus, data, eval_parts), hooks


def check(config: Config, workdir: AnyPath, verb_hooks: Sequence[type[Hook]]) -> None:
    """Checks what `train` checks before it makes a state, with the same errors; logs the result.

    The data is prepared, and left in the workdir. A new run can still begin there with another
    config.
    """
    run, _ = _prepare(config, workdir, verb_hooks)
    log(
        f"checked: the config, the data ({run.corpus.name}: {run.data.size()} train), the mesh "
        f"({progress.describe_devices(run.setup.mesh)}), and that each device holds the "
        f"{least_memory(run.setup) / GIB:.2g} GiB of the state, the gradient and the batch; "
        "without --dry_run, this command trains"
    )


def _open(
    run: PreparedRun, stopwatch: Stopwatch, stop: StopSignals, stack: ExitStack
) -> tuple[Training, ExitStack]:
    """Opens the run's history, watchdog and checkpoints on a stack: what is opened last ends first.

    So trackers end after the last checkpoint, which matters more, and the history after both. Also
    returns the stack for the trackers, which are opened later, when their first step is known.
    """
    stack.enter_context(stopwatch.counting_compilation())
    history = stack.enter_context(History(run.workdir, stopwatch))
    watchdog = stack.enter_context(Watchdog(run.workdir))
    trackers_end = stack.enter_context(ExitStack())
    checkpoints = Checkpoints.of(run.workdir, run.config.train)
    stack.callback(lambda: history.write_saves(checkpoints.finished_saves()))  # the last save
    stack.enter_context(checkpoints)
    training = Training(
        **vars(run),
        checkpoints=checkpoints,
        history=history,
        stopwatch=stopwatch,
        watchdog=watchdog,
        stop=stop,
    )
    return training, trackers_end


def _restore(training: Training) -> RestoredCheckpoint | None:
    """The checkpoint from which the run continues, or None; sets the run's start and clock."""
    config, setup, train = training.config, training.setup, training.config.train
    what = "restoring the train state"
    with Progress(what), training.watchdog.limit(what, train.save_timeout):
        restored = training.checkpoints.restore(setup.abstract_state, training.corpus.fingerprint)
    training.start = restored.step if restored else 0
    tokens = train.batch_size * config.data.sequence_length
    training.clock = Clock(train.total_steps, tokens, training.start, training.stopwatch)
    progress.log_new_rate(training.workdir, config, training.start)
    return restored


def _wait_for(
    compiling: Future, training: Training, depths: list[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], TrainStep], float]:
    """The train steps by their depths, and the seconds that it took to compile them."""
    what = f"compiling {progress.describe_steps(depths)}"
    limit = training.watchdog.limit(what, training.config.train.compile_timeout)
    with training.stopwatch.during(COMPILE), limit, Progress(what):
        return compiling.result()
