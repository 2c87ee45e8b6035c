"""The validation loss while a model trains: `train.eval_*`."""

from typing import ClassVar

from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.runs.goodput import EVALUATION
from t5x_diffeq.runs.hooks import Hook, LoopPosition, Training
from t5x_diffeq.runs.progress import eval_line
from t5x_diffeq.runtime.console import say
from t5x_diffeq.training.evaluation import evaluate_loss, make_eval_step


class Evaluation(Hook):
    """Evaluates the parameters and, with `train.eval_averages`, their averages."""

    name: ClassVar[str] = "eval"
    activity: ClassVar[str] = EVALUATION
    runs_later: ClassVar[bool] = True

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.eval_every)
        self.eval_step = make_eval_step(training.setup)

    def run(self, position: LoopPosition) -> dict[str, float]:
        """Loss, perplexity and the like, by name."""
        keys = self.training.config.train
        evaluated = {"eval": position.state.params}
        if keys.eval_averages and position.state.averages is not None:
            evaluated["eval_averages"] = position.state.averaged_params()
        reports: dict[str, float] = {}
        results = {name: self._evaluate(x, position.step) for name, x in evaluated.items()}
        for name, values in results.items():
            say(eval_line(position.step, values, self.training.config.data.loss_on, name))
            reports |= {f"{name}/{key}": x for key, x in values.items()}
        return reports

    def _evaluate(self, params: dict, step: int) -> dict[str, float]:
        training, keys = self.training, self.training.config.train
        sequences = sum(map(len, training.eval_parts))
        rows = training.setup.eval_batch_size(min(keys.eval_batch_size, sequences))
        whole = keys.eval_all_at_end and step == keys.total_steps
        batches = eval_batches(
            training.eval_parts,
            rows,
            training.setup.batch_sharding,
            None if whole else keys.eval_batches,
            f"evaluating at step {step}",
        )
        return evaluate_loss(self.eval_step, params, training.stop.interruptible(batches))
