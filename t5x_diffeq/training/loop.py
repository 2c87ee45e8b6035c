"""Training, from the checks of the config to the last checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.restoring import check_continues
from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, TrainState
from t5x_diffeq.checkpoints.workdir import check_config, comparing_failures
from t5x_diffeq.cluster.processes import run_in_turn
from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.cluster.watchdog import Watchdog
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.corpus import Corpus, prepare_corpus
from t5x_diffeq.data.examples import TrainingData, eval_examples, training_data
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.system.chips import GIB
from t5x_diffeq.system.compilation_cache import enable_cache
from t5x_diffeq.system.console import Progress, log
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.training import progress
from t5x_diffeq.training.basic_hooks import Saves
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.depths import depths_of, depths_to_come
from t5x_diffeq.training.goodput import CHECKPOINT, COMPILE, OTHER, STEPS
from t5x_diffeq.training.history import Clock, History, Stopwatch
from t5x_diffeq.training.hook_list import HookClass, Hooks, load_hooks
from t5x_diffeq.training.hooks import DoneStep, Hook, LoopPosition, Training
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.setup import (
    Setup,
    expected_vocab_size,
    least_memory,
    make_setup,
)
from t5x_diffeq.training.spike_hook import GoBack, go_back
from t5x_diffeq.training.step import compile_train_steps
from t5x_diffeq.training.teacher import load_teacher
from t5x_diffeq.training.tracking.jsonl import kinds_reported_at
from t5x_diffeq.training.tracking.trackers import open_writer


def _check_and_prepare(
    config: Config, workdir: AnyPath, verb_hooks: Sequence[type[Hook]]
) -> tuple[Setup, Corpus, TrainingData, list[Windows], list[HookClass]]:
    """Checks the config, and prepares the data and the examples to evaluate on."""
    new = check_config(config, workdir)
    if not new:
        check_continues(workdir)
    run_checks("train", config, new=new)
    setup = make_setup(config, expected_vocab_size(config))  # checks what it can without data
    run_checks("train", config, setup)
    first_hooks = [HookClass(cls, cls) for cls in verb_hooks]
    hooks = [*first_hooks, *load_hooks(config.train.hooks), HookClass(Saves, Saves)]
    for hook in hooks:
        hook.cls.check(config, setup)
    corpus = run_in_turn(
        lambda first: prepare_corpus(
            config.data,
            workdir,
            new and first,
            config.model.vocab_size,
            tuned=bool(config.init_from),
        ),
        "the data is prepared",
    )
    if corpus.tokenizer.vocab_size != setup.model.config.vocab_size:
        setup = make_setup(config, corpus.tokenizer.vocab_size)
    run_checks("train", config, setup, corpus)
    data = training_data(config, corpus)
    eval_parts = eval_examples(config.data, corpus)
    for hook in hooks:
        hook.cls.check_corpus(config, setup, corpus)
    return setup, corpus, data, eval_parts, hooks


def check(config: Config, workdir: AnyPath, verb_hooks: Sequence[type[Hook]]) -> None:
    """Checks what `train` checks before it makes a state, with the same errors; says what.

    The data is prepared, and left in the workdir of a new run, which can still begin with another.
    """
    setup, corpus, data, *_ = _check_and_prepare(config, workdir, verb_hooks)
    needed = least_memory(setup) / GIB
    log(
        f"checked: the config, the data ({corpus.name}: {data.size()} train), the mesh "
        f"({progress.describe_devices(setup.mesh)}), and that each device holds the {needed:.2g} "
        "GiB of the state, the gradient and the batch; without --dry_run, this command trains"
    )


def train(
    config: Config,
    workdir: AnyPath,
    verb_hooks: Sequence[type[Hook]],
    make_state: Callable[[Setup], TrainState] = Setup.init_state,
    finish: Callable[[Setup, TrainState], None] = lambda setup, state: None,
) -> int:
    """Trains to `config.train.total_steps`; returns the exit status: 0; 42 or 130 if stopped.

    Args:
      config: the run's config.
      workdir: a new workdir, or one whose run is resumed.
      verb_hooks: the hooks of every run. Those of `train.hooks` follow, and `Saves` is last: a
        checkpoint comes after all reports of its step.
      make_state: makes the train state of a run that has none yet.
      finish: called with the last state of a run that is done.

    Raises:
      InputError: if the config or data is invalid; detected before training starts.
      RunError: if the run fails.
    """
    stopwatch, train_config = Stopwatch(), config.train
    setup, corpus, data, eval_parts, hook_classes = _check_and_prepare(config, workdir, verb_hooks)

    with setup.context(), StopSignals() as stop, ExitStack() as stack:
        # ---------------------------------------------------------------- state, new or restored
        stack.enter_context(stopwatch.counting_compilation())
        history = stack.enter_context(History(workdir, stopwatch))
        watchdog = stack.enter_context(Watchdog(workdir))
        trackers_end = stack.enter_context(ExitStack())  # after the checkpoints, which matter more
        checkpoints = Checkpoints.of(workdir, train_config)
        stack.callback(lambda: history.write_saves(checkpoints.finished_saves()))  # the last one
        stack.enter_context(checkpoints)
        programs = enable_cache()
        reading = watchdog.limit("restoring the train state", train_config.save_timeout)
        with Progress("restoring the train state"), reading:
            restored = checkpoints.restore(setup.abstract_state, corpus.fingerprint)
        start = restored.step if restored else 0
        progress.log_new_rate(workdir, config, start)
        stack.enter_context(comparing_failures(workdir, start))
        depths = depths_to_come(config, start) if start < train_config.total_steps else []
        teacher = load_teacher(setup)
        # The steps are compiled in a thread, while the state is made and evaluated.
        pool = stack.enter_context(ThreadPoolExecutor(1, "compile"))
        compiling = pool.submit(
            compile_train_steps, setup, train_config.batch_size, depths, teacher
        )

        def wait() -> tuple[dict, float]:
            what = f"compiling {progress.describe_steps(depths)}"
            limit = watchdog.limit(what, train_config.compile_timeout)
            with stopwatch.during(COMPILE), limit, Progress(what):
                return compiling.result()

        if setup.mesh.devices.flat[0].platform == "gpu":
            wait()  # XLA chooses a GPU's kernels by their times
        making = watchdog.limit("making the train state", train_config.save_timeout)
        with Progress("making the train state"), making:
            first = restored or RestoredCheckpoint(make_state(setup))
            state = setup.complete(first.state)
        progress.write_overview(setup.abstract_state.params, workdir)
        progress.log_account(config, setup, corpus, data, workdir, start)

        # ---------------------------------------------------------------- hooks, and the first ones
        tokens = train_config.batch_size * config.data.sequence_length
        training = Training(
            config,
            setup,
            workdir,
            corpus,
            data,
            eval_parts,
            start,
            checkpoints,
            history,
            stopwatch,
            Clock(train_config.total_steps, tokens, start, stopwatch),
            watchdog,
            stop,
        )
        hooks = Hooks(training, [hook.make(training) for hook in hook_classes])
        at_start = hooks.due_at_start(kinds_reported_at(workdir, start))
        if start > train_config.total_steps or (start == train_config.total_steps and not at_start):
            finish(setup, state)
            log(f"already finished: {start} of {train_config.total_steps} steps are done")
            progress.log_next_commands(workdir)
            return 0
        history.start(start, train_config.total_steps)
        training.writer = trackers_end.enter_context(
            open_writer(workdir, start, train_config.trackers, first.facts.reports)
        )
        training.writer.write_hparams(progress.hyperparameters(setup))
        trackers_end.callback(lambda: stopwatch.turn_to(OTHER))
        teacher_params = (teacher.params,) if teacher else ()
        stack.enter_context(hooks)
        hooks.restore(first.facts.hooks)
        step, consumed, batches = start, first.batches_consumed, _batches_after(training, first)
        stopping = not hooks.run(at_start, LoopPosition(start, state, consumed))
        if depths and not stopping:
            train_steps, seconds = wait()
            progress.log_ready(depths, sum(stopwatch.seconds().values()), seconds, programs)

        # ---------------------------------------------------------------- loop
        watchdog.expect(f"step {start + 1}", train_config.hang_timeout)
        stopwatch.turn_to(STEPS)
        in_flight: DoneStep | None = None
        while step < train_config.total_steps and not stopping:
            step, consumed = step + 1, consumed + 1
            hooks.before_batch(step, state)
            with training.clock.waiting_for_data(in_flight and in_flight.metrics):
                batch = next(batches)
            hooks.before_step(step, state, batch)
            train_step = train_steps[depths_of(config, step)]
            state, metrics = train_step(state, batch, *teacher_params)
            hooks.after_step(step, state, metrics)
            done, in_flight = [in_flight], DoneStep(step, batch, metrics, consumed)
            stopping = stop.should_stop()
            due = [] if stopping else hooks.due(step)
            # The step before is reported while this one runs; this one, before its state is used.
            if due or stopping:
                done, in_flight = [*done, in_flight], None
            try:
                for each in filter(None, done):
                    hooks.report(each)
            except GoBack as error:
                first, in_flight = go_back(training, hooks, error.spike, state), None
                step, state, consumed = first.step, first.state, first.batches_consumed
                batches = _batches_after(training, first)
                continue
            position = LoopPosition(step, state, consumed)
            stopping = not hooks.run(due, position) or stopping
            if stopping:
                hooks.stop(position)
        stopwatch.turn_to(CHECKPOINT)
        watchdog.expect("saving the last checkpoint", train_config.save_timeout)
        if not stopping:
            finish(setup, state)

    # -------------------------------------------------------------------- end: all is saved
    if stopping:
        assert stop.reason is not None
        progress.log_stopped(stop.reason.name, step)
        return stop.reason.status
    progress.log_summary(workdir, sum(stopwatch.seconds().values()))
    return 0


def _batches_after(training: Training, at: RestoredCheckpoint) -> Iterator[Batch]:
    """The batches after a checkpoint."""
    return training.data.batches(
        training.setup.batch_sharding, at.batches_consumed, at.facts.position
    )
