"""Flags that several verbs have, each defined once."""

from absl import flags

from t5x_diffeq.runtime.keys.values import BEST, INT32, STEPS


def define_workdir(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--workdir` of a run that exists."""
    return flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=verb_flags)


def define_num_steps(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--num_steps`, which is a number or None."""
    meaning = "Number of solver steps, or layers. [default: the trained one]"
    return flags.DEFINE_integer("num_steps", None, meaning, 1, STEPS, flag_values=verb_flags)


def define_checkpoint(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--checkpoint`, whose value is a step, "best" or None."""
    return flags.DEFINE(
        _CheckpointParser(),
        "checkpoint",
        None,
        "Step of the checkpoint, or best: the one with the lowest evaluation loss. [default: the "
        "newest]",
        flag_values=verb_flags,
    )


def define_averages(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--averages`."""
    meaning = "Take the moving averages of the parameters (train.ema_decay)."
    return flags.DEFINE_bool("averages", False, meaning, flag_values=verb_flags)


def define_adapters(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--adapters`."""
    meaning = "The adapters/ folder of a run that was fine-tuned from this one."
    return flags.DEFINE_string("adapters", None, meaning, flag_values=verb_flags)


def define_prompts(verb_flags: flags.FlagValues, what: str) -> flags.FlagHolder:
    """Defines `--prompt`, whose value is a list or None; `what` says what the texts are for."""
    meaning = f"{what}; may be repeated. [default: the start of the validation text]"
    return flags.DEFINE_multi_string("prompt", None, meaning, flag_values=verb_flags)


def define_part(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--part`, for `command_line.parse_part`."""
    meaning = "Do only part i of n, as i/n, for an array of jobs."
    return flags.DEFINE_string("part", "0/1", meaning, flag_values=verb_flags)


def define_dry_run(verb_flags: flags.FlagValues) -> flags.FlagHolder:
    """Defines `--dry_run`."""
    meaning = "Print the commands without running them."
    return flags.DEFINE_boolean("dry_run", False, meaning, flag_values=verb_flags)


class _CheckpointParser(flags.ArgumentParser):
    """Parses a step or "best"."""

    def parse(self, argument: str | int) -> int | str:
        """The step, or "best"; raises a ValueError, as absl expects, for anything else."""
        text = str(argument)
        if text == BEST:
            return BEST
        if not (text.isdecimal() and int(text) <= INT32):
            raise ValueError(f"it must be a step, from 0 to {INT32}, or {BEST}")
        return int(text)

    def flag_type(self) -> str:
        """What `--help` calls the type."""
        return f"a step or {BEST}"
