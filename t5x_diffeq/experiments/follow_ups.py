"""What follows a training: analyses, tasks, costs, and figure 5's tunings on another text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from t5x_diffeq.config.config_files import project_config, values_of
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, Label, format_flags
from t5x_diffeq.experiments.tokenizers import KEY, fill_in_tokenizer
from t5x_diffeq.system.errors import InputError

# Prompts for figure 3 and appendix F: in each, the next word depends on an earlier one. The paper
# shows a possessive pronoun that stands for a name (`its` after BIGBANG) and the noun that an
# ordinal calls for (`match` after a Go player's fourth). These sentences are our own, of the same
# kind.
FIGURE_3 = (
    "BIGBANG was formed in Seoul. In concert BIGBANG and",  # its
    "Lee Sedol lost three matches of Go to a computer in a row. He won the fourth",  # match
)
PROMPTS = (
    *FIGURE_3,
    "The ship left the harbour at dawn. Nobody on board knew that the",  # ship
    "Maria gave the letter to her brother because she trusted",  # him
    "Sleep changes with age. Children need more of it, and old people often say that they",  # sleep
    "Paris is the capital of France, and Rome is the capital of",  # Italy
)
# Clustering simulates particles, and needs no model.
CLUSTERING = ExperimentRun("clustering", "analyze", ("clustering", "--output={output}/clustering"))
_TABLE_6 = (20, 48, 72, 96, 120, 144)  # the values of T in the paper's table 6

# Tables of what follows a training.
TASK_TABLES = (TableSpec(("text", "task", "shots"), "model", "score"),)
COST_TABLES = tuple(
    TableSpec(("config",), "T", value)
    for value in (
        *(f"model / baseline: {ratio}" for ratio in ("step_ms", "temporary_bytes", "state_bytes")),
        "model: parameters",
    )
)
# How much the spectra of attention and the MLP grow with depth.
GROWTH_TABLES = tuple(
    TableSpec(("text", "size"), "model", f"{part}/{number}")
    for number in ("rank_correlation", "ratio")
    for part in ("qk", "ov", "mlp")
)


def follow(
    trained: ExperimentRun, verb: str, suffix: str, *arguments: str, **labels: int
) -> ExperimentRun:
    """A run of a verb on a trained model, with the labels of its training and others."""
    name = f"{trained.name}-{suffix}"
    folders = (f"--workdir={{output}}/{trained.name}", f"--output={{output}}/{name}")
    labelled = {**trained.labels, **labels}
    return ExperimentRun(name, verb, (*arguments, *folders), labelled, trained.name)


def analyse_spectra(trained: ExperimentRun) -> list[ExperimentRun]:
    """A follow-up that analyses a model's spectra."""
    return [follow(trained, "analyze", "spectra", "spectra", "--times=201")]


def analyse_lyapunov(prompts: Sequence[str]) -> Callable[[ExperimentRun], list[ExperimentRun]]:
    """A follow-up that analyses a model's Lyapunov exponents on these prompts."""
    given = [f"--prompt={prompt}" for prompt in prompts]

    def analyse(trained: ExperimentRun) -> list[ExperimentRun]:
        suffix = f"lyapunov-{len(prompts)}-prompts"
        return [follow(trained, "analyze", suffix, "lyapunov", *given, "--times=201")]

    return analyse


def ask_papers_tasks(trained: ExperimentRun) -> list[ExperimentRun]:
    """Follow-ups that evaluate a model on the paper's eleven tasks, zero-shot and five-shot."""
    return [
        follow(
            trained,
            "evaluate",
            f"{shots}-shot",
            "--tasks=paper",
            f"--num_fewshot={shots}",
            shots=shots,
        )
        for shots in (0, 5)
    ]


def time_steps(config: str) -> tuple[ExperimentRun, ...]:
    """The ODE model's optimizer step against its baseline's, timed alternately, for each T."""
    return tuple(
        ExperimentRun(
            f"cost-T={T}",
            "benchmark",
            (f"--config={project_config(config)}", *format_flags({"model.time_embed_dim": T})),
            {"config": f"configs/{config}", "T": T},
        )
        for T in _TABLE_6
    )


_STEPS = {"ode": 18, "baseline": 24}
_TUNINGS = {  # methods and grids
    "ode": tuple(product(("lora", "full", "hypernetwork"), (9, 12, 18, 24))),
    "baseline": (("lora", 24), ("full", 24)),
}


@dataclass(frozen=True, kw_only=True)
class Figure5(Experiment):
    """Training on each of two texts, and every way of tuning on the other."""

    config: str
    base: dict[str, Keys] = field(default_factory=dict)  # keys of the trainings, by variant
    tuning: Keys  # keys of every tuning
    by_method: dict[str, Keys]  # further keys of tunings, by method
    tables: tuple[TableSpec, ...] = (
        TableSpec(("trained on", "tuned on", "method"), "steps", "perplexity", over_steps=True),
    )
    seeds: int = 1

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs, each training before its tunings.

        Args:
          texts: two texts, or one besides the standard library.

        Raises:
          InputError: if there are not two texts.
        """
        texts = texts if len(texts) == 2 else {"stdlib": {"data.source": "stdlib"}, **texts}
        if len(texts) != 2:
            raise InputError("figure5 needs two texts: set --text=NAME=PATH; the other is stdlib")
        architecture = values_of(self.config, "ode")["model.architecture"]
        texts = {name: fill_in_tokenizer(keys, architecture) for name, keys in texts.items()}
        return [
            run
            for seed in seeds
            for source, target in (tuple(texts), tuple(texts)[::-1])
            for variant in _STEPS
            for run in self._train_and_tune(source, target, variant, texts, seed)
        ]

    def _train_and_tune(
        self, source: str, target: str, variant: str, texts: Texts, seed: int
    ) -> list[ExperimentRun]:
        suffix, with_seed = (f"-seed={seed}", {"seed": seed}) if seed else ("", {})
        keys = {"model.num_steps": _STEPS[variant], **self.base.get(variant, {}), **with_seed}
        config = f"--config={project_config(self.config)}:{variant}"
        trained = f"{source}-{variant}{suffix}"
        runs = [ExperimentRun(trained, "train", (config, *format_flags({**keys, **texts[source]})))]
        for method, steps in _TUNINGS[variant]:
            keys = {**self.tuning, **self.by_method.get(method, {}), **texts[target], **with_seed}
            keys.pop(KEY, None)  # the tokenizer comes from the run that is tuned
            arguments = (
                f"--config={project_config('finetune.py')}:{method}",
                f"--config.init_from={{output}}/{trained}",
                *format_flags({**keys, "model.num_steps": steps}),
            )
            labels: dict[str, Label] = {
                "trained on": source,
                "tuned on": target,
                "seed": seed,
                "method": f"{variant}, {method}",
                "steps": steps,
            }
            name = f"{trained}-{method}-{steps}"
            runs.append(ExperimentRun(name, "finetune", arguments, labels, trained))
        return runs
