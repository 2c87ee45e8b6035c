"""Analyses of trained models by `analyze`: figures 2, 3 and 13, appendices E and F of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from t5x_diffeq.experiments.comparison import Comparison, make_training
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.files import AnyPath

_GROWTH = tuple(
    f"{product}/{number}"
    for number in ("rank_correlation", "ratio")
    for product in ("qk", "ov", "mlp")
)
GROWTH_TABLES = tuple(TableSpec(("text", "size"), "model", value) for value in _GROWTH)


def _make_analysis(
    trained: ExperimentRun, kind: str, prompts: Sequence[str] = (), times: int = 201
) -> ExperimentRun:
    name = f"{trained.name}-{kind}" + (f"-{len(prompts)}-prompts" if prompts else "")
    folders = (f"--workdir={{output}}/{trained.name}", f"--output={{output}}/{name}")
    given = tuple(f"--prompt={prompt}" for prompt in prompts)
    arguments = (kind, *folders, *given, f"--times={times}")
    return ExperimentRun(name, "analyze", arguments, trained.labels, trained.name)


def list_pages(outcomes: Sequence[dict]) -> list[str]:
    """The paths of the analyses' pages, as one paragraph."""
    found = [f"- {outcome['page']}" for outcome in outcomes if "page" in outcome]
    return ["Pages, with figures and arrays beside them:\n\n" + "\n".join(found)] if found else []


@dataclass(frozen=True, kw_only=True)
class Analyses(Comparison):
    """Analyses of the models of a comparison.

    Attributes:
      kinds: kinds of `analyze`; clustering simulates particles and needs no model.
      prompts: prompts for Lyapunov exponents.
    """

    kinds: tuple[str, ...]
    prompts: tuple[str, ...] = ()

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """Each training, then its analyses."""
        made = []
        if self.variants:
            for trained in super().runs(texts, seeds, done):
                made.append(replace(trained, labels={}))
                if "spectra" in self.kinds:
                    made.append(_make_analysis(trained, "spectra"))
                if "lyapunov" in self.kinds:
                    made.append(_make_analysis(trained, "lyapunov", self.prompts))
        if "clustering" in self.kinds:
            made.append(
                ExperimentRun(
                    "clustering", "analyze", ("clustering", "--output={output}/clustering")
                )
            )
        return made

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """The pages."""
        return list_pages(outcomes)


# The study's models, small enough that all of its runs take about two hours on one core.
_SMALL: Keys = {
    "model.embed_dim": 64,
    "model.mlp_dim": 256,
    "train.total_steps": 600,
    "train.batch_size": 4,
}
# With the paper's initialisation W(t) moves faster; only embeddings decay, as in the paper's runs.
_OF_INIT: dict[str, Keys] = {
    "invariant": {},
    "paper": {
        "optimizer.learning_rate": 1e-3,
        "optimizer.decay": "embeddings",
        "optimizer.weight_decay": 0.1,
    },
}


@dataclass(frozen=True, kw_only=True)
class SpectraStudy(Experiment):
    """Whether the spectra of attention and the MLP grow with depth: appendix E on a laptop.

    GPT's and Llama's block, 12 and 16 solver steps, both initialisations, and the baseline.
    """

    tables: tuple[TableSpec, ...] = tuple(
        TableSpec(("text", "model", "architecture", "init"), "num_steps", value)
        for value in _GROWTH
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """Each training, then its analysis; the ODEs first."""
        need_text(texts)
        choices = [
            *(("ode", *rest) for rest in product(seeds, (12, 16), _OF_INIT, ("gpt", "llama"))),
            *(("baseline", *rest) for rest in product(seeds, (12, 16), ("",), ("gpt", "llama"))),
        ]
        made = []
        for text, (variant, seed, steps, init, block) in product(texts, choices):
            own = {"model.architecture": block, "model.num_steps": steps}
            own |= {"model.init": init, **_SMALL, **_OF_INIT[init]} if init else _SMALL
            trained = make_training("laptop.py", text, texts[text], variant, own, seed)
            trained = replace(trained, labels={**trained.labels, "init": init})
            made += [replace(trained, labels={}), _make_analysis(trained, "spectra", times=25)]
        return made

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """The pages."""
        return list_pages(outcomes)
