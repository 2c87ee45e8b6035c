"""Eight times the text: do more layers pay then, and is W(t) ahead?

    python -m studies.more_text --text=stdlib

The other studies of bets read 10 bytes of text for each parameter of GPT's kernels, and there four
layers are ahead of six and twelve at equal FLOPs. Here GPT of six layers reads 80 bytes. GPTs of
four and twelve layers under Euler's scheme do as many FLOPs in more or fewer optimizer steps. W(t)
has six and four steps, with T = 48, and with four steps also as many parameters as GPT.
"""

from studies.study import Model, Models, Scale, run_study, sweeps_at_two_scales
from t5x_diffeq.experiments.experiment import Keys

_VOCABULARY, _N = 256, 6


def _models(width: int) -> Models:
    head = _VOCABULARY / (12 * width)  # its FLOPs, over those of a layer

    def model(variant: str, steps: int, **keys: int) -> Model:
        of_model: Keys = {f"model.{key}": value for key, value in keys.items()}
        return Model(variant, {"model.num_steps": steps, **of_model}, (_N + head) / (steps + head))

    return {
        **{f"GPT, Euler's scheme, N = {steps}": model("euler", steps) for steps in (6, 4, 12)},
        **{f"ode, N = {steps}": model("ode", steps) for steps in (6, 4)},
        # W0 and N - 1 matrices P, as many kernels as GPT has
        "ode, as many parameters, N = 4": model("ode", 4, time_embed_dim=3),
    }


LAPTOP, PAPER = sweeps_at_two_scales(_models, laptop=Scale((32,), 4.0), paper=Scale((48, 64), 4.0))

if __name__ == "__main__":
    run_study("more_text", __doc__, LAPTOP, PAPER)
