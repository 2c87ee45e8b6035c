"""Fine-tunes the model of a run, also at another number of steps: --config=FILE --workdir=NEW.

FILE is configs/finetune.py:lora, :full or :hypernetwork. --config.init_from=DIR names the run
that provides the model, its weights and the tokenizer.
--config.model.num_steps=9 chooses the number of solver steps. NEW becomes a complete run; the same
command again resumes it.
"""

from collections.abc import Mapping

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import KEYS, Config, flatten, is_run
from t5x_diffeq.config.plugins import trust
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_path

FLAGS = VerbFlags(__name__)
CONFIG = FLAGS.define_config("configs/finetune.py:lora, :full or :hypernetwork.")
_WORKDIR = FLAGS.define_text("workdir", "Folder of the new run, or of one to resume.")
_NEEDED = "--config=configs/finetune.py:lora (:full, :hypernetwork) and --config.init_from=DIR"


def main() -> int:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError(f"finetune needs {_NEEDED}, and --workdir=NEW")
    workdir = flag_values.parse_folder(_WORKDIR, "finetune")

    from t5x_diffeq.checkpoints.workdir import sole_writer  # importing JAX takes seconds

    with sole_writer(workdir):
        return finetune(flatten(CONFIG.value), workdir)


def complete_config(given: Mapping[str, object], pretrained: Config) -> Config:
    """The config with the model and the tokenizer of the pretrained run.

    Args:
      given: the values of the config file by dotted key; None for a key of the grid means the
        pretrained run's value.

    Raises:
      InputError: if a key is set whose value the pretrained run determines; names the key.
    """
    from t5x_diffeq.model.ode.sources import source_of

    values, base = dict(given), pretrained.flat()
    if given["model.weights"] is None and source_of(pretrained.model).stored:
        raise InputError(
            f"model.weights isn't set, and {pretrained.model.weights} weights, the run's own, have "
            "no hypernetwork to tune; take configs/finetune.py:lora or :full"
        )
    for name, key in KEYS.items():
        from_run = name.startswith("model.") and given[name] is None
        if key.finetune is True and not from_run:
            continue
        if key.finetune != "if set" or given[name] == key.default:
            if given[name] is not None and given[name] not in (base[name], key.default):
                raise InputError(
                    f"{name}={given[name]} can't be set: model and tokenizer come from init_from, "
                    f"where it is {base[name]}; leave it out (model.num_steps, model.scheme and "
                    f"adapters may differ), and give {_NEEDED}"
                )
            values[name] = base[name]
    return pretrained.with_values(values)


def _take_over(given: Mapping[str, object], workdir: AnyPath, first: bool) -> Config:
    """The completed config; for a new workdir it is checked, and the tokenizer is copied there."""
    from t5x_diffeq.checkpoints.workdir import check_config, read_config
    from t5x_diffeq.data.recipe import adopt_tokenizer
    from t5x_diffeq.data.tokenizer_folder import tokenizer_of_run
    from t5x_diffeq.training.checks import run_checks

    trust(given)
    if is_run(workdir):
        return complete_config(given, read_config(workdir))
    source = parse_path(str(given["init_from"]), "config.init_from")
    named = "config.init_from="
    if not source.exists() and "/" not in str(given["init_from"]).strip("./"):
        named = "config.init_from (a model of the Hub becomes a run by `convert --input`): "
    config = complete_config(given, read_config(source, named=named))
    run_checks("finetune", config)
    check_config(config, workdir)  # before the tokenizer of a run that lost its config is replaced
    if first:
        adopt_tokenizer(tokenizer_of_run(source), workdir / "tokenizer", config.data)
    return config


def finetune(given: Mapping[str, object], workdir: AnyPath) -> int:
    """Tunes to `config.train.total_steps`; returns the exit status, as `train` does.

    Args:
      given: the values of the config file by dotted key; the run in `init_from` has the other
        values.
      workdir: a new workdir, or one whose run is resumed.

    Raises:
      InputError: if the pretrained run can't be used, or not with this config.
      RunError: if the run fails.
    """
    from t5x_diffeq.cluster.processes import run_in_turn
    from t5x_diffeq.model.sub_fields import declared_leaves
    from t5x_diffeq.training.load import PretrainedRun, init_from_pretrained

    if not given["init_from"]:
        raise InputError(f"config.init_from is not set; finetune needs {_NEEDED}, a trained run")
    config = run_in_turn(
        lambda first: _take_over(given, workdir, first), "the tokenizer is taken over"
    )

    def make_state(setup):
        source = parse_path(str(config.init_from), "config.init_from")
        vocab_size = setup.model.config.vocab_size
        state, step = init_from_pretrained(
            setup, PretrainedRun(source, vocab_size, config.init_step)
        )
        log(f"starts from the weights of {source} at step {step}")
        frozen = [
            "/".join(path)
            for path, leaf in declared_leaves(setup.model.config).items()
            if leaf.role == "kernel" and not leaf.takes_adapter
        ]
        if config.model.adapter_rank and frozen:
            log(f"these kernels have no adapters, and are frozen: {', '.join(frozen)}")
        return state

    return train_to_end(config, workdir, make_state=make_state)
