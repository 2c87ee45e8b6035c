"""Training, from the checks of the config to the last checkpoint."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import fmean

import jax

from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.examples import check_data, epochs, eval_examples, train_examples
from t5x_diffeq.data.pipeline import eval_batches, train_batches
from t5x_diffeq.data.streams import gather_positions
from t5x_diffeq.inference.downstream import DownstreamTasks
from t5x_diffeq.runs import progress
from t5x_diffeq.runs.teacher import check_teacher, check_teachers_tokenizer, load_teacher
from t5x_diffeq.runs.workdir import check_config, save_config
from t5x_diffeq.runtime.compilation_cache import enable_cache
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.console import Progress, say
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.runtime.processes import run_in_turn
from t5x_diffeq.runtime.signals import StopSignals
from t5x_diffeq.runtime.watchdog import Watchdog
from t5x_diffeq.training.checkpoint import Checkpoints, RestoredCheckpoint
from t5x_diffeq.training.depths import check_depths, depths_of, depths_to_come
from t5x_diffeq.training.evaluation import evaluate_loss
from t5x_diffeq.training.metrics import MetricWriter, warn_if_lost
from t5x_diffeq.training.setup import Setup, check_fits, check_new, expected_vocab_size, make_setup
from t5x_diffeq.training.state import TrainState
from t5x_diffeq.training.step import (
    StepMetrics,
    check_finite,
    compile_train_step,
    make_eval_step,
)


def train(
    config: Config,
    workdir: AnyPath,
    make_state: Callable[[Setup], TrainState] = Setup.init_state,
    finish: Callable[[Setup, TrainState], None] = lambda setup, state: None,
) -> int:
    """Trains to `config.train.total_steps`.

    Args:
      config: the run's config.
      workdir: a new workdir, or one whose run is resumed.
      make_state: makes the train state of a run that has none yet.
      finish: called with the last state of a run that is done.

    Returns:
      The exit status: 0 if done, 42 or 130 if stopped and saved.

    Raises:
      InputError: if the config or data can't be used, before anything long starts.
      RunError: if the run fails.
    """
    # ------------------------------------------------------------------ checks and data
    started = time.perf_counter()
    new = check_config(config, workdir)
    setup = make_setup(config, expected_vocab_size(config))  # refuses what it can without data
    check_fits(setup, config.train.batch_size)
    if new:
        check_new(config)
    check_depths(config)
    check_data(config.data)
    check_teacher(config)
    downstream = DownstreamTasks(config.tasks)
    downstream.check(setup.model.config)
    corpus = run_in_turn(
        lambda first: prepare_corpus(config.data, workdir, new and first, config.model.vocab_size),
        "the data is prepared",
    )
    if corpus.tokenizer.vocab_size != setup.model.config.vocab_size:
        setup = make_setup(config, corpus.tokenizer.vocab_size)
    check_teachers_tokenizer(config, corpus.tokenizer)
    length, batch_size = config.data.sequence_length, config.train.batch_size
    examples = train_examples(config.data, corpus, batch_size, config.seed)
    eval_parts = eval_examples(config.data, corpus)
    eval_sequences = sum(map(len, eval_parts))

    with setup.context(), StopSignals() as stop, ExitStack() as stack:
        # -------------------------------------------------------------- state, new or restored
        limits = config.train
        watchdog = stack.enter_context(Watchdog(workdir))
        checkpoints = stack.enter_context(
            Checkpoints(workdir, limits.keep_checkpoints, limits.verify_checkpoints)
        )
        cache = enable_cache()
        with Progress("making or restoring the train state"):
            restored = checkpoints.restore(setup.abstract_state, corpus.fingerprint)
            first = restored or RestoredCheckpoint(make_state(setup), 0, None, None)
            state, start = first.state, first.step
        warn_if_lost(workdir, start, first.reports)
        total_steps = config.train.total_steps
        gone_through = epochs(examples, total_steps * batch_size)
        progress.write_overview(setup.abstract_state.params, workdir)
        progress.say_account(config, setup, corpus, gone_through, workdir, start)
        if start >= total_steps:
            finish(setup, state)
            say(f"already finished: {start} of {total_steps} steps are done")
            progress.say_next(workdir)
            return 0

        # -------------------------------------------------------------- compiled steps
        teacher = load_teacher(setup)
        of_teacher = (teacher.params,) if teacher else ()
        compiling = time.perf_counter()
        eval_step = make_eval_step(setup)
        depths = depths_to_come(config, start)
        with Progress(f"compiling {progress.describe_steps(depths)}"):
            train_steps = {
                each: compile_train_step(setup, batch_size, each, teacher) for each in depths
            }
        now = time.perf_counter()
        say(
            f"ready after {now - started:.1f} s, {now - compiling:.1f} s of it to compile "
            f"{progress.describe_steps(depths)} (compilation cache {cache})"
        )

        # -------------------------------------------------------------- what happens between steps
        writer = stack.enter_context(MetricWriter(workdir, start))
        clock = progress.Clock(total_steps, batch_size * length, start)

        def is_due(step: int, every: int) -> bool:
            return step % every == 0 or step == total_steps

        def report(step: int, metrics: StepMetrics) -> None:
            values = {name: float(v) for name, v in jax.device_get(metrics).compute().items()}
            check_finite(step, values, checkpoints.latest_step, start)
            watchdog.expect(f"step {step + 1}", limits.hang_timeout)
            if step == start + 1:
                save_config(config, workdir)  # from here on the workdir belongs to this config
                say(f"first step done {time.perf_counter() - started:.1f} s after the start")
            if is_due(step, config.train.log_every):
                rate = clock.rate(step)
                if config.train.depths:
                    values["num_steps"] = fmean(depths_of(config, step))
                values |= {"tokens_per_second": rate, **progress.utilisation(setup, rate)}
                writer.write(step, {f"train/{name}": value for name, value in values.items()})
                say(clock.line(step, values["loss"], rate))

        def evaluate_now(step: int) -> None:
            evaluation = watchdog.limit(f"evaluation at step {step}", limits.eval_timeout)
            with clock.pause(), evaluation:
                rows = setup.eval_batch_size(min(config.train.eval_batch_size, eval_sequences))
                whole = config.train.eval_all_at_end and step == total_steps
                limit = None if whole else config.train.eval_batches
                title = f"evaluating at step {step}"
                batches = eval_batches(eval_parts, rows, setup.batch_sharding, limit, title)
                values = evaluate_loss(eval_step, state.params, batches)
                writer.write(step, {f"eval/{name}": value for name, value in values.items()})
                say(progress.eval_line(step, values, config.data.loss_on))

        def run_tasks_now(step: int) -> None:
            with clock.pause(), watchdog.limit(f"tasks at step {step}", limits.eval_timeout):
                rows = config.train.eval_batch_size
                values = downstream.run(setup, state.params, corpus.tokenizer, rows)
                writer.write(step, values)

        def save_now(step: int) -> None:
            saving = watchdog.limit(f"saving checkpoint {step}", limits.save_timeout)
            with clock.pause(), saving:
                writer.flush()
                reports = writer.reports
                checkpoints.save(
                    step, state, corpus.fingerprint, gather_positions(positions), reports
                )

        # -------------------------------------------------------------- loop
        threads = config.data.read_threads
        batches = train_batches(
            examples,
            batch_size,
            config.seed,
            start,
            setup.batch_sharding,
            threads,
            first.stream_positions,
        )
        if start == 0:
            evaluate_now(0)
        watchdog.expect(f"step {start + 1}", limits.hang_timeout)
        in_flight = None
        for step in range(start + 1, total_steps + 1):
            batch, positions = next(batches)
            state, metrics = train_steps[depths_of(config, step)](state, batch, *of_teacher)
            if in_flight:
                report(*in_flight)  # the previous step, while this one runs
            in_flight = (step, metrics)
            stopping = stop.should_stop()
            evaluating = is_due(step, config.train.eval_every)
            on_tasks = downstream and is_due(step, downstream.every) and not stopping
            saving = is_due(step, config.train.checkpoint_every) or stopping
            if evaluating or on_tasks or saving:
                report(*in_flight)  # check it and write its metrics before the state is saved
                in_flight = None
            if evaluating:
                evaluate_now(step)
            if on_tasks:
                run_tasks_now(step)
            if saving:
                save_now(step)
            if stopping:
                break
            checkpoints.check()
        watchdog.expect("saving the last checkpoint", limits.save_timeout)
        if step == total_steps:
            finish(setup, state)

    # ------------------------------------------------------------------ end: all is saved
    if step < total_steps:
        assert stop.reason is not None  # the loop ends early only if there is one
        say(f"stopped by {stop.reason.name} after step {step}, saved; the same command continues")
        return stop.reason.status
    progress.say_summary(workdir, time.perf_counter() - started)
    return 0
