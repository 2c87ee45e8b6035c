"""The block of `parts.SquaredBlock` in PyTorch; it stands beside modeling_diffeq.py."""

from torch import Tensor, nn

from .modeling_diffeq import DiffEqConfig, DiffEqForCausalLM, DiffEqModel, Norm, Step


class SquaredConfig(DiffEqConfig):
    """Its shapes, and the power of the ReLU."""

    model_type = "t5x_diffeq_squared"

    def __init__(self, power=2, **kwargs):
        self.power = power
        super().__init__(**kwargs)


class SquaredStep(Step):
    """A step with another g."""

    def __init__(self, config: SquaredConfig, step: int):
        super().__init__(config, step)
        del self.mlp, self.mlp_norm
        self.power = config.power
        self.wide_norm = Norm(config.hidden_size, config.gpt, config.norm_shift, config.norm_eps)
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def g(self, y: Tensor) -> Tensor:
        """The MLP's part."""
        return self.narrow(self.widen(self.wide_norm(y)).relu() ** self.power)


class SquaredModel(DiffEqModel):
    """A model of such steps."""

    config_class = SquaredConfig
    step_class = SquaredStep


class SquaredForCausalLM(DiffEqForCausalLM):
    """The same, with a head."""

    config_class = SquaredConfig
    model_class = SquaredModel
