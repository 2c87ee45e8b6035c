"""Training, from the checks of the config to the last checkpoint."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from statistics import fmean
from typing import NamedTuple

import jax

from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.examples import check_data, epochs, eval_examples, train_examples
from t5x_diffeq.data.pipeline import eval_batches, train_batches
from t5x_diffeq.data.streams import StreamPositions, gather_positions
from t5x_diffeq.inference.downstream import DownstreamTasks
from t5x_diffeq.inference.samples import Samples, check_samples
from t5x_diffeq.runs import progress
from t5x_diffeq.runs.figures import WeightFigures, check_figures
from t5x_diffeq.runs.goodput import CHECKPOINT, COMPILE, EVALUATION, OTHER, ROLLBACK, STEPS
from t5x_diffeq.runs.history import History, Stopwatch
from t5x_diffeq.runs.hyperparameters import hyperparameters
from t5x_diffeq.runs.profiler import Profiler, check_profile
from t5x_diffeq.runs.spike_policy import SpikePolicy
from t5x_diffeq.runs.teacher import check_teacher, check_teachers_tokenizer, load_teacher
from t5x_diffeq.runs.watcher import Watcher
from t5x_diffeq.runs.workdir import check_config, save_config
from t5x_diffeq.runtime.compilation_cache import enable_cache
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.console import Progress, say
from t5x_diffeq.runtime.files import AnyPath, describe_error
from t5x_diffeq.runtime.processes import gather, run_in_turn
from t5x_diffeq.runtime.signals import Interrupted, StopSignals
from t5x_diffeq.runtime.watchdog import Watchdog
from t5x_diffeq.tracking.jsonl import kinds_reported_at, warn_if_lost
from t5x_diffeq.tracking.memory import memory_in_use
from t5x_diffeq.tracking.trackers import check_trackers, open_writer
from t5x_diffeq.training.checkpoint import Checkpoints, DataPosition, RestoredCheckpoint
from t5x_diffeq.training.config_checks import check_new
from t5x_diffeq.training.depths import (
    check_depths,
    depths_of,
    depths_to_come,
    full_grid_from,
)
from t5x_diffeq.training.device_memory import check_fits
from t5x_diffeq.training.diagnosis import find_cause
from t5x_diffeq.training.evaluation import evaluate_loss
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.setup import Setup, expected_vocab_size, make_setup
from t5x_diffeq.training.state import TrainState
from t5x_diffeq.training.step import (
    StepMetrics,
    check_finite,
    compile_train_step,
    make_eval_step,
)


class DoneStep(NamedTuple):
    """An optimizer step that was given to the devices.

    Attributes:
      step: its number.
      batch: its batch.
      metrics: its metrics.
      drawn: how many batches were drawn, its own included.
      positions: the positions of the rows' streams after its batch, if there are streams.
    """

    step: int
    batch: Batch
    metrics: StepMetrics
    drawn: int
    positions: StreamPositions | None


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
    started, stopwatch = time.perf_counter(), Stopwatch()
    new = check_config(config, workdir)
    setup = make_setup(config, expected_vocab_size(config))  # refuses what it can without data
    check_fits(setup, config.train.batch_size)
    if new:
        check_new(config)
    check_depths(config)
    check_profile(config.train)
    check_data(config.data)
    check_teacher(config)
    check_trackers(config.train.trackers)
    check_figures(config.train)
    check_samples(config.train, setup.model.config)
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
    samples = Samples(config.train, setup, corpus.tokenizer)
    figures = WeightFigures(config.train, setup)

    with setup.context(), StopSignals() as stop, ExitStack() as stack:
        # -------------------------------------------------------------- state, new or restored
        limits = config.train
        history = stack.enter_context(History(workdir, stopwatch))
        watchdog = stack.enter_context(Watchdog(workdir))
        trackers_end = stack.enter_context(ExitStack())  # after the checkpoints, which matter more
        checkpoints = Checkpoints.of(workdir, limits)
        stack.callback(lambda: history.write_saves(checkpoints.finished_saves()))  # the last one
        stack.enter_context(checkpoints)
        cache = enable_cache()
        reading = watchdog.limit("making or restoring the train state", limits.save_timeout)
        with Progress("making or restoring the train state"), reading:
            restored = checkpoints.restore(setup.abstract_state, corpus.fingerprint)
            first = restored or RestoredCheckpoint(make_state(setup))
            start, state = first.step, setup.complete(first.state)
        warn_if_lost(workdir, start, first.reports)
        total_steps = config.train.total_steps
        gone_through = epochs(examples, total_steps * batch_size)
        progress.write_overview(setup.abstract_state.params, workdir)
        progress.say_account(config, setup, corpus, gone_through, workdir, start)
        # What is done between steps, by the first part of the names of its reports, and how often.
        # Figures come first, because they are drawn while the model is evaluated.
        occasions = {
            "figure": figures.every,
            "eval": config.train.eval_every,
            "sample": samples.every,
            "tasks": downstream.every if downstream else None,
        }

        def is_due(step: int, every: int | None) -> bool:
            return every is not None and (step % every == 0 or step == total_steps)

        def due_at(step: int) -> list[str]:
            return [kind for kind, every in occasions.items() if is_due(step, every)]

        # What comes before the first step, or was left out by the stop after which the run goes on.
        done_before = {"figure", *kinds_reported_at(workdir, start)} if start else {"tasks"}
        at_start = [kind for kind in due_at(start) if kind not in done_before]
        at_start = gather("what is left out", at_start)[0]  # process 0 has the reports
        if start > total_steps or (start == total_steps and not at_start):
            finish(setup, state)
            say(f"already finished: {start} of {total_steps} steps are done")
            progress.say_next(workdir)
            return 0

        # -------------------------------------------------------------- steps compile in a thread
        history.start(start, total_steps)
        writer = trackers_end.enter_context(open_writer(workdir, start, config.train.trackers))
        trackers_end.callback(lambda: stopwatch.turn_to(OTHER))
        teacher = load_teacher(setup)
        of_teacher = (teacher.params,) if teacher else ()
        depths = depths_to_come(config, start) if start < total_steps else []

        def compile_steps() -> tuple[dict[tuple[int, ...], Callable[..., tuple]], float]:
            began = time.perf_counter()
            with setup.context():
                steps: dict[tuple[int, ...], Callable[..., tuple]] = {
                    each: compile_train_step(setup, batch_size, each, teacher) for each in depths
                }
            return steps, time.perf_counter() - began

        pool = stack.enter_context(ThreadPoolExecutor(1, "compile"))
        compiling = pool.submit(compile_steps)
        eval_step, full_from = make_eval_step(setup), full_grid_from(config)
        watcher = Watcher(setup, batch_size)

        # -------------------------------------------------------------- what happens between steps
        writer.write_hparams(hyperparameters(setup))
        clock = progress.Clock(total_steps, batch_size * length, start, stopwatch)
        spikes = SpikePolicy(config.train, history)
        eval_losses: dict[int, float] = {}  # by step
        profiler = stack.enter_context(
            Profiler(config.train, workdir, lambda: stopwatch.during(OTHER))
        )

        @contextmanager
        def instead(activity: str, what: str, seconds: float) -> Iterator[None]:
            with stopwatch.during(activity), watchdog.limit(what, seconds):
                yield

        def explain(done: DoneStep) -> str | None:
            """Where values that aren't finite begin; whatever goes wrong here hides nothing."""
            with instead(OTHER, f"looking at step {done.step}", limits.eval_timeout):
                try:
                    return find_cause(setup, state.params, done.batch)
                except Exception as error:  # such as a lack of memory
                    return f"where that begins can't be found: {describe_error(error)}"

        def report(done: DoneStep) -> bool:
            """Whether the run has to go back because of a spike."""
            step = done.step
            watcher.write(step, writer)
            values = {n: float(v) for n, v in jax.device_get(done.metrics).compute().items()}
            cause = partial(explain, done)
            if spikes.take(step, values, cause):
                if spikes.goes_back(step, checkpoints.rollback_step()):
                    return True
            else:
                check_finite(step, values, checkpoints.latest_step, start, cause)
            watchdog.expect(f"step {step + 1}", limits.hang_timeout)
            if step == start + 1:
                save_config(config, workdir)  # from here on the workdir belongs to this config
                say(f"first step done {time.perf_counter() - started:.1f} s after the start")
            if is_due(step, config.train.log_every):
                rates = clock.rates(step)
                rate = rates["tokens_per_second"]
                if config.train.depths:
                    values["num_steps"] = fmean(depths_of(config, step))
                values |= {**rates, "goodput": history.goodput()}
                values |= {**progress.utilisation(setup, rate), **memory_in_use()}
                finite = {f"train/{name}": x for name, x in values.items() if isfinite(x)}
                writer.write_scalars(step, finite)
                history.write_time(step)
                say(clock.line(step, values["loss"], rate))
            return False

        def evaluate_now(step: int) -> None:
            with instead(EVALUATION, f"evaluation at step {step}", limits.eval_timeout):
                rows = setup.eval_batch_size(min(config.train.eval_batch_size, eval_sequences))
                whole = config.train.eval_all_at_end and step == total_steps
                limit = None if whole else config.train.eval_batches
                evaluated = {"eval": state.params}
                if config.train.eval_averages and state.averages is not None:
                    evaluated["eval_averages"] = state.averaged_params()
                results = {}
                for name, params in evaluated.items():
                    title = f"evaluating at step {step}"
                    batches = eval_batches(eval_parts, rows, setup.batch_sharding, limit, title)
                    batches = stop.interruptible(batches)
                    results[name] = evaluate_loss(eval_step, params, batches)
                for name, values in results.items():
                    writer.write_scalars(step, {f"{name}/{key}": x for key, x in values.items()})
                    say(progress.eval_line(step, values, config.data.loss_on, name))
                eval_losses[step] = results["eval"]["loss"]

        def run_tasks_now(step: int) -> None:
            with instead(EVALUATION, f"tasks at step {step}", limits.eval_timeout):
                rows = config.train.eval_batch_size
                values = downstream.run(
                    setup, state.params, corpus.tokenizer, rows, stop.interruptible
                )
                writer.write_scalars(step, values)

        def sample_now(step: int) -> None:
            with instead(OTHER, f"samples at step {step}", limits.eval_timeout):
                writer.write_texts(step, samples.run(state.params, stop.interruptible))

        def draw_now(step: int) -> None:
            with instead(OTHER, f"figures at step {step}", limits.eval_timeout):
                figures.run(step, state.params, writer)

        def save_now(step: int, locally: bool) -> None:
            with instead(CHECKPOINT, f"saving checkpoint {step}", limits.save_timeout):
                # The workdir's checkpoints need the lines up to their step in the same bucket.
                writer.try_flush() if locally else writer.flush()
                position = DataPosition(drawn, gather_positions(positions))
                facts = corpus.fingerprint, position, writer.reports, eval_losses.get(step)
                checkpoints.save(step, state, *facts, locally=locally)
            history.write_time(step, at_once=not locally)

        def draw(position: DataPosition) -> Iterator[tuple[Batch, StreamPositions | None]]:
            return train_batches(
                examples,
                batch_size,
                config.seed,
                position.drawn,
                setup.batch_sharding,
                config.data.read_threads,
                position.streams,
            )

        def go_back(spike: DoneStep) -> RestoredCheckpoint:
            """The last checkpoint, with the position of the data after the spike."""
            count = spike.metrics.compute()["spikes"]
            with instead(ROLLBACK, "going back to a checkpoint", limits.save_timeout):
                checkpoints.wait()
                for array in jax.tree.leaves(state):
                    array.delete()  # two states may be more than the devices hold
                found = checkpoints.go_back(setup.abstract_state, corpus.fingerprint)
                writer.rewind(found.step)
            watcher.forget()
            profiler.cut()
            clock.go_back(found.step)
            history.write_time(spike.step, at_once=True)
            history.write("rollback", spike.step, to=found.step, count=int(count))
            position = DataPosition(spike.drawn, gather_positions(spike.positions))
            counted = found.state.with_spikes(count)
            return found._replace(state=counted, position=position)

        # -------------------------------------------------------------- while the steps compile
        actions: dict[str, Callable[[int], None]] = {
            "figure": draw_now,
            "eval": evaluate_now,
            "sample": sample_now,
            "tasks": run_tasks_now,
        }
        step, drawn, batches = start, first.position.drawn, draw(first.position)
        in_flight: DoneStep | None = None
        stopping = False
        if at_start and setup.mesh.devices.flat[0].platform == "gpu":
            wait([compiling])  # XLA chooses a GPU's kernels by their times
        try:
            for kind in at_start:
                actions[kind](start)
        except Interrupted:
            stopping = True
        if depths and not stopping:
            what = progress.describe_steps(depths)
            limit = watchdog.limit(f"compiling {what}", limits.compile_timeout)
            with stopwatch.during(COMPILE), limit, Progress(f"compiling {what}"):
                train_steps, seconds = compiling.result()
            say(
                f"ready after {time.perf_counter() - started:.1f} s; to compile {what} took "
                f"{seconds:.1f} s of it (compilation cache {cache})"
            )

        # -------------------------------------------------------------- loop
        watchdog.expect(f"step {start + 1}", limits.hang_timeout)
        stopwatch.turn_to(STEPS)
        while step < total_steps and not stopping:
            step, drawn = step + 1, drawn + 1
            profiler.before_step(step, state)
            with clock.waiting_for_data(in_flight and in_flight.metrics):
                batch, positions = next(batches)
            if step == full_from:
                say(f"step {step}: from here on, {config.model.num_steps} solver steps")
            train_step = train_steps[depths_of(config, step)]
            state, metrics = watcher.run(step, train_step, state, batch, *of_teacher)
            profiler.after_step(step, state)
            previous, in_flight = in_flight, DoneStep(step, batch, metrics, drawn, positions)
            stopping = stop.should_stop()
            due = [] if stopping else due_at(step)
            saving = is_due(step, limits.checkpoint_every) or step in limits.milestones
            locally = limits.local_checkpoints and step % limits.local_checkpoint_every == 0
            # The previous step is reported while this one runs; this one, before its state is used.
            done = [previous]
            if due or saving or locally or stopping:
                done, in_flight = [previous, in_flight], None
            if spike := next((each for each in done if each and report(each)), None):
                first, in_flight = go_back(spike), None
                step, drawn, batches = first.step, first.position.drawn, draw(first.position)
                state = setup.complete(first.state)
                continue
            try:
                for kind in due:
                    actions[kind](step)
            except Interrupted:
                stopping = True
            if saving or locally or stopping:
                save_now(step, locally=not (saving or stopping))
            checkpoints.check()
            history.write_saves(checkpoints.finished_saves())
        stopwatch.turn_to(CHECKPOINT)
        watchdog.expect("saving the last checkpoint", limits.save_timeout)
        if not stopping:
            finish(setup, state)

    # ------------------------------------------------------------------ end: all is saved
    if stopping:
        assert stop.reason is not None
        where = f"after step {step}, saved" if step else "before the first step"
        say(f"stopped by {stop.reason.name} {where}; the same command continues")
        return stop.reason.status
    progress.say_summary(workdir, time.perf_counter() - started)
    return 0
