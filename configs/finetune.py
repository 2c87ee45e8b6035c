"""Another run's model, tuned on a grid of its own (paper, section 6.2: figure 5).

    python -m t5x_diffeq.finetune --config=configs/finetune.py:lora --workdir=NEW \\
        --config.init_from=DIR --config.model.num_steps=9 \\
        --config.data.source=text_files --config.data.path=...

The model and its tokenizer come from the run in DIR: W(t), made at the nodes of `model.num_steps`
steps (None: as many as it was trained with), becomes layer weights. The paper trains with 18 steps
and tunes with 9, 12, 18 and 24, and by LoRA also trains the embeddings.

Variants: `:lora` (default), low-rank branches; `:full`, all weights of the grid; `:hypernetwork`,
no layer weights: the run's own hypernetwork is trained further at the new number of steps.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import default

LORA = ("adapters", "embeddings")


def get_config(method: str = "lora") -> ConfigDict:
    """The config; keys of the model that are None have their values in the pretrained run.

    Raises:
      ValueError: if there is no such variant.
    """
    config = default.get_config()
    with config.unlocked(), config.ignore_type():
        config.model.num_steps = placeholder(int)
        config.model.scheme = placeholder(str)
    config.optimizer.decay = "kernels"
    config.optimizer.weight_decay = 0.01
    if method == "lora":
        config.model.weights = "per_layer"
        config.model.adapter_rank = 8
        config.train.trainable = LORA
        config.optimizer.learning_rate = 1e-3
    elif method == "full":
        config.model.weights = "per_layer"
        config.optimizer.learning_rate = 3e-4
    elif method == "hypernetwork":
        with config.unlocked(), config.ignore_type():
            config.model.weights = placeholder(str)
        config.optimizer.decay = "embeddings"
        config.optimizer.learning_rate = 1e-3  # 3e-4 for runs of model.init="paper": T larger steps
    else:
        raise ValueError(f"variant {method!r} is unknown; there are lora, full, hypernetwork")
    return config
