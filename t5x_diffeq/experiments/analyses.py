"""Analyses of trained models by `analyze`: figures 2, 3 and 13, appendices E and F of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from t5x_diffeq.experiments.comparison import Comparison, training
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run
from t5x_diffeq.runtime.files import AnyPath

GROWTH = tuple(
    f"{product}/{number}"
    for number in ("rank_correlation", "ratio")
    for product in ("qk", "ov", "mlp")
)
GROWTH_LAYOUTS = tuple(Layout(("text", "size"), "model", value) for value in GROWTH)


def analysis(trained: Run, kind: str, prompts: Sequence[str] = (), times: int = 201) -> Run:
    """The run of `analyze KIND` on a trained run, with that run's labels."""
    name = f"{trained.name}-{kind}" + (f"-{len(prompts)}-prompts" if prompts else "")
    folders = (f"--workdir={{output}}/{trained.name}", f"--output={{output}}/{name}")
    given = tuple(f"--prompt={prompt}" for prompt in prompts)
    arguments = (kind, *folders, *given, f"--times={times}")
    return Run(name, "analyze", arguments, trained.labels, trained.name)


def pages(outcomes: Sequence[dict]) -> list[str]:
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

    def runs(self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]) -> list[Run]:
        """Each training, then its analyses."""
        made = []
        if self.variants:
            for trained in super().runs(texts, seeds, done):
                made.append(replace(trained, labels={}))
                if "spectra" in self.kinds:
                    made.append(analysis(trained, "spectra"))
                if "lyapunov" in self.kinds:
                    made.append(analysis(trained, "lyapunov", self.prompts))
        if "clustering" in self.kinds:
            made.append(
                Run("clustering", "analyze", ("clustering", "--output={output}/clustering"))
            )
        return made

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """The pages."""
        return pages(outcomes)


# The study's models, small enough that all of its runs take about two hours on one core.
SMALL: Keys = {
    "model.embed_dim": 64,
    "model.mlp_dim": 256,
    "train.total_steps": 600,
    "train.batch_size": 4,
}
# With the paper's initialisation W(t) moves faster; only embeddings decay, as in the paper's runs.
OF_INIT: dict[str, Keys] = {
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

    layouts: tuple[Layout, ...] = tuple(
        Layout(("text", "model", "architecture", "init"), "num_steps", value) for value in GROWTH
    )

    def runs(self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]) -> list[Run]:
        """Each training, then its analysis; the ODEs first."""
        need_text(texts)
        choices = [
            *(("ode", *rest) for rest in product(seeds, (12, 16), OF_INIT, ("gpt", "llama"))),
            *(("baseline", *rest) for rest in product(seeds, (12, 16), ("",), ("gpt", "llama"))),
        ]
        made = []
        for text, (variant, seed, steps, init, block) in product(texts, choices):
            own = {"model.architecture": block, "model.num_steps": steps}
            own |= {"model.init": init, **SMALL, **OF_INIT[init]} if init else SMALL
            trained = training("laptop.py", text, texts[text], variant, own, seed)
            trained = replace(trained, labels={**trained.labels, "init": init})
            made += [replace(trained, labels={}), analysis(trained, "spectra", times=25)]
        return made

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """The pages."""
        return pages(outcomes)
