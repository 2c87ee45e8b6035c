"""Figure 5 of the paper (section 6.2): trained with 18 steps on one text, tuned on another.

W(t) is taken on grids of 9, 12, 18 and 24 steps and tuned as layer weights by LoRA, in full, or on
the hypernetwork itself; the baseline has 24 layers all along. Both ways between the texts.
"""

from dataclasses import dataclass

from t5x_diffeq.errors import InputError
from t5x_diffeq.experiments.comparison import Keys
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run, flags

GRIDS = (9, 12, 18, 24)
TUNING = {
    "train.batch_size": 8,
    "train.eval_batches": 64,
    "train.total_steps": 100,
    "train.eval_every": 50,
    "model.adapter_rank": 8,  # embed_dim / 16
}
PAPER_TUNING = {"train.batch_size": 256, "train.total_steps": 10_000, "model.adapter_rank": 200}


@dataclass(frozen=True)
class Figure5:
    """Training on each of two texts, and all ways of tuning on the other."""

    layouts: tuple[Layout, ...] = (
        Layout(("trained on", "tuned on", "method"), "steps", "perplexity"),
    )

    def runs(self, scale: str, texts: dict[str, Keys], done: dict[str, dict]) -> list[Run]:
        """All runs, each text's trainings before the tunings of what they trained.

        Args:
          scale: "laptop" or "paper".
          texts: by name, their keys of the config: two, or one beside the standard library.
          done: outcomes by the name of their run.

        Raises:
          InputError: if they aren't.
        """
        texts = texts if len(texts) == 2 else {"stdlib": {"data.source": "stdlib"}, **texts}
        if len(texts) != 2:
            raise InputError("figure5 needs two texts: --text=NAME=PATH, the other one is stdlib")
        laptop = scale == "laptop"
        config = "configs/laptop.py" if laptop else "configs/gpt_medium.py"
        tuning = TUNING if laptop else PAPER_TUNING
        made = []
        for source, target in (tuple(texts), tuple(texts)[::-1]):
            for variant, steps in (("ode", 18), ("baseline", 24)):
                base = f"{source}-{variant}"
                grid = {"model.num_steps": steps}
                made.append(
                    Run(
                        base,
                        "train",
                        (f"--config={config}:{variant}", *flags({**grid, **texts[source]})),
                    )
                )
                made += tunings(base, source, target, variant, texts[target], tuning)
        return made


def tunings(
    base: str,
    source: str,
    target: str,
    variant: str,
    text: dict[str, object],
    tuning: dict[str, object],
) -> list[Run]:
    """The ways to tune one trained model."""
    ode = variant == "ode"
    methods = ("lora", "full", "hypernetwork") if ode else ("lora", "full")
    return [
        Run(
            f"{base}-{method}-{steps}",
            "finetune",
            (
                f"--config=configs/finetune.py:{method}",
                f"--config.init_from={{output}}/{base}",
                *flags({**without_adapters(tuning, method), **text, "model.num_steps": steps}),
            ),
            {
                "trained on": source,
                "tuned on": target,
                "method": f"{variant}, {method}",
                "steps": steps,
            },
            needs=base,
        )
        for method in methods
        for steps in (GRIDS if ode else (24,))
    ]


def without_adapters(tuning: dict[str, object], method: str) -> dict[str, object]:
    """The keys that a method has."""
    return {k: v for k, v in tuning.items() if method == "lora" or k != "model.adapter_rank"}
