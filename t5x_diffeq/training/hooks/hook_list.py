"""The hooks of a run: their classes, and how the loop calls them."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.cluster import recurrence
from t5x_diffeq.cluster.processes import gather
from t5x_diffeq.cluster.signals import Interrupted
from t5x_diffeq.config.plugins import load_plugin
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.training.hooks.hook import DoneStep, Hook, LoopPosition, Training
from t5x_diffeq.training.objective import Batch


class HookClass(NamedTuple):
    """A class of hooks, and how one is made."""

    cls: type[Hook]  # its `check` and `check_corpus` are called before a hook is made
    make: Callable[[Training], Hook]  # the class, with the arguments that the config gives


def load_hooks(names: Sequence[str], taken: Sequence[str] = ()) -> list[HookClass]:
    """The classes that `train.hooks` names; an InputError if one is no valid class of hooks.

    `taken` are the names of the run's other hooks.
    """
    hooks: list[HookClass] = []
    for name in names:
        make = load_plugin("train.hooks", name)
        cls = getattr(make, "func", make)  # a class with arguments is a `partial` of the class
        where = f"train.hooks={name}"
        if not (isinstance(cls, type) and issubclass(cls, Hook)):
            raise InputError(f"{where} is not a class derived from t5x_diffeq.Hook")
        if not getattr(cls, "name", None):
            raise InputError(f"{where}: the class has no name; give it one")
        used = [*taken, *(each.cls.name for each in hooks)]
        if cls.name in used:
            raise InputError(
                f"{where}: its name {cls.name!r} is another hook's, and their numbers "
                f"and states are kept by name; the names {', '.join(used)} are taken"
            )
        own = {n for kind in cls.__mro__ if kind not in Hook.__mro__ for n in vars(kind)}
        if not any(callable(vars(Hook).get(name)) for name in own - {"__init__"}):
            raise InputError(f"{where}: the class does nothing; give it a `run(self, position)`")
        _check_methods(cls, where)
        every = getattr(make, "keywords", {}).get("every")
        if getattr(make, "args", ()):
            raise InputError(f"{where}: name the arguments, as in {cls.__name__}(every=100)")
        is_count = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if every is not None and not is_count:
            raise InputError(f"{where}: every={every!r}; it must be a whole number of at least 1")
        try:
            inspect.signature(make).bind(None)  # None stands for the Training
        except (TypeError, ValueError) as error:
            takes = inspect.signature(cls)
            raise InputError(
                f"{where}: its arguments are invalid; the class takes {takes}, and it gets the "
                "run's Training first, as in __init__(self, training, size=4)"
            ) from error
        hooks.append(HookClass(cls, make))
    return hooks


def _check_methods(cls: type[Hook], where: str) -> None:
    """Raises an InputError if a method can't be called with the arguments of `Hook`'s method."""
    for name in (each for each in vars(Hook) if not each.startswith("_")):
        method, own = getattr(Hook, name), getattr(cls, name)
        if not inspect.isroutine(method) or not inspect.isroutine(own):
            continue
        if inspect.ismethod(method) and not inspect.ismethod(own):
            raise InputError(f"{where}: its method {name} must be a @classmethod")
        takes = inspect.signature(method).parameters
        try:
            inspect.signature(own).bind(*takes)
        except TypeError as error:
            raise InputError(
                f"{where}: its method must be {name}({', '.join(takes)}), and is "
                f"{name}{inspect.signature(own)}"
            ) from error


def _check_numbers(values: Any, name: str, others: Sequence[str]) -> None:
    """Raises a RunError for a value that is no number or another hook's; fetches no value.

    Args:
      name: the hook's name.
      others: the names of the run's other hooks.
    """
    items = values.items() if isinstance(values, Mapping) else [(None, 0)]
    if any(not isinstance(n, str) or isinstance(x, str | None) or np.ndim(x) for n, x in items):
        raise RunError(f"`run` returns {values!r:.60}; it must return a dict of numbers, or None")
    for number in values:
        if (hook := number.partition("/")[0]) in others and hook != name:
            raise RunError(
                f"`run` returns {number!r}, a number of the hook {hook}; begin its name with "
                f"{name + '/'!r}"
            )


def make_hook(hook_class: HookClass, training: Training) -> Hook:
    """A hook of a run; an InputError if its `__init__` leaves out that of `Hook`."""
    with naming_hook(hook_class.cls):
        hook = hook_class.make(training)
    if not hasattr(hook, "every"):
        raise InputError(
            f"the hook {hook.name}: its __init__ must call super().__init__(training, every)"
        )
    runs = type(hook).run is not Hook.run and type(hook).is_due is Hook.is_due
    if runs and hook.every is None and not type(hook).__module__.startswith("t5x_diffeq."):
        log(
            f"note: the hook {hook.name} has no `every`, so its run is never called; "
            f"{type(hook).__name__}(every=100) calls it every 100 steps"
        )
    return hook


class Hooks:
    """The hooks of a run, called in their order."""

    def __init__(self, training: Training, hooks: Sequence[Hook]):
        self.training, self.hooks = training, hooks
        training.hook_states = self.states

    def __enter__(self) -> "Hooks":
        with ExitStack() as stack:  # if a hook fails here, the hooks before it are ended
            for hook in self.hooks:
                with naming_hook(hook):
                    stack.enter_context(hook)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def due_at_start(self, reported: Sequence[str]) -> list[Hook]:
        """The hooks to run before the first step of this attempt.

        `reported` has the parts before the / of the names that were reported at this step; the list
        of process 0 decides.
        """
        start = self.training.start
        reported = gather("reports at the start", list(reported))[0]
        if start == 0:
            return [hook for hook in self.due(0) if hook.runs_at_0]
        return [h for h in self.due(start) if h.runs_later and h.name not in reported]

    def due(self, step: int) -> list[Hook]:
        """The hooks to run after `step`."""
        return [hook for hook in self.hooks if hook.is_due(step)]

    def _each(self, step: int, call: Callable[[Hook], None], backwards: bool = False) -> None:
        for hook in reversed(self.hooks) if backwards else self.hooks:
            with naming_hook(hook, step):
                call(hook)

    def before_batch(self, step: int, state: TrainState) -> None:
        """Calls `before_batch` of each hook."""
        self._each(step, lambda hook: hook.before_batch(step, state))

    def before_step(self, step: int, state: TrainState, batch: Batch) -> None:
        """Calls `before_step` of each hook."""
        self._each(step, lambda hook: hook.before_step(step, state, batch))

    def after_step(self, step: int, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        """Calls `after_step` of each hook, the last hook first: hooks nest, as contexts do."""
        self._each(step, lambda hook: hook.after_step(step, state, metrics), backwards=True)

    def report(self, done: DoneStep) -> None:
        """Waits for a step, and tells each hook its numbers."""
        metrics = jax.device_get({n: x for n, x in done.metrics.items() if x.ndim == 0})
        # All hooks get the same dict, from which `Spikes` removes `spike` for the hooks after it.
        values = {name: float(x) for name, x in metrics.items()}
        self._each(done.step, lambda hook: hook.report(done, values))
        recurrence.at_step(done.step)
        limit = self.training.config.train.hang_timeout
        self.training.watchdog.expect(f"step {done.step + 1}", limit)

    def run(self, hooks: Sequence[Hook], position: LoopPosition) -> bool:
        """Runs these hooks; returns False if a signal interrupted one of them."""
        try:
            for hook in hooks:
                with self._instead(hook, position.step):
                    tree = str(jax.tree.structure(position.state))
                    values = hook.run(position)
                    if str(jax.tree.structure(position.state)) != tree:
                        raise RunError(
                            "`run` has added or removed arrays of the train state; it must change "
                            "a copy"
                        )
                    if values:
                        _check_numbers(values, hook.name, [each.name for each in self.hooks])
                        self.training.writer.write_scalars(position.step, values)
                        position.values.update(values)
        except Interrupted:
            return False
        return True

    def stop(self, position: LoopPosition) -> None:
        """Calls `stop` of each hook."""
        for hook in self.hooks:
            with self._instead(hook, position.step):
                hook.stop(position)

    @contextmanager
    def _instead(self, hook: Hook, step: int) -> Iterator[None]:
        """A context in which the hook runs instead of steps."""
        seconds = getattr(self.training.config.train, hook.timeout)
        what = f"{hook.name} at step {step}"
        with naming_hook(hook, step), self.training.instead(hook.activity, what, seconds):
            yield

    def go_back(self, step: int) -> None:
        """Calls `go_back` of each hook."""
        self._each(step, lambda hook: hook.go_back(step))

    def states(self) -> dict[str, list]:
        """What hooks keep, by their names: a value of each process; all processes must call it."""
        keeping = [hook for hook in self.hooks if type(hook).to_save is not Hook.to_save]
        if not keeping:
            return {}
        kept = {hook.name: hook.to_save() for hook in keeping}
        for name, value in kept.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise RunError(
                    f"the hook {name}: `to_save` returns {value!r:.60}; it must return what JSON "
                    f"can hold ({error}), such as x.tolist() of an array"
                ) from error
        by_process = gather("what hooks keep", kept)
        return {hook.name: [each[hook.name] for each in by_process] for hook in keeping}

    def restore(self, states: Mapping[str, list]) -> None:
        """Gives each hook what it kept."""
        for hook in self.hooks:
            if kept := states.get(hook.name):
                index = jax.process_index()
                saved = kept[index] if index < len(kept) else kept[0]
                if saved is not None:
                    hook.restore(saved)


@contextmanager
def naming_hook(hook: Hook | type[Hook], step: int | None = None) -> Iterator[None]:
    """A context whose errors get a note that names the hook.

    Foreseen errors of the project's own hooks get none, because their messages say enough.
    """
    try:
        yield
    except BaseException as error:  # also the SystemExit of a hook that wants to end the process
        foreseen = isinstance(error, InputError | RunError | InfrastructureError)
        of_class = hook if isinstance(hook, type) else type(hook)
        is_builtin = of_class.__module__.startswith("t5x_diffeq.training.")
        if not (isinstance(error, Interrupted) or (foreseen and is_builtin)):
            where = "" if step is None else f" at step {step}"
            error.add_note(f"in the hook {hook.name}{where}")
        raise
