"""The flags of a verb: methods that define each kind of flag, and flags that several verbs have."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from t5x_diffeq.config.config_files import read_config_file
from t5x_diffeq.config.keys.values import BEST, INT32, STEPS
from t5x_diffeq.system.environment import split_words


class VerbFlags(flags.FlagValues):
    """The flags of a verb, which its module defines when it is imported.

    Args:
      module: the module's `__name__`; a module that is run as a script ends here, with a message.
      positional: the flag whose value may also be given without its name, as the first argument.
    """

    def __init__(self, module: str, positional: str | None = None):
        super().__init__()
        vars(self)["positional"] = positional  # setting an attribute would set a flag
        if module == "__main__":
            verb = Path(sys.argv[0]).stem
            sys.stderr.write(f"error: this file is no script; run python -m t5x_diffeq.{verb}\n")
            sys.exit(2)

    def name_positional(self, arguments: list[str]) -> list[str]:
        """The command line, in which `--NAME=` precedes the positional word if there is one."""
        program, *rest = arguments
        if self.positional and rest and not rest[0].startswith("-"):
            rest[0] = f"--{self.positional}={rest[0]}"
        return [program, *rest]

    def define_text(self, name: str, meaning: str, default: str | None = None) -> flags.FlagHolder:
        """Defines a flag whose value is a string."""
        return flags.DEFINE_string(name, default, meaning, flag_values=self)

    def define_texts(self, name: str, meaning: str) -> flags.FlagHolder:
        """Defines a flag that may be repeated, whose value is a list."""
        return flags.DEFINE_multi_string(name, [], meaning, flag_values=self)

    def define_words(self, name: str, meaning: str) -> flags.FlagHolder:
        """Defines a flag whose value is None or a list, separated by commas or white space."""
        return flags.DEFINE(WordsParser(), name, None, meaning, flag_values=self)

    def define_choice(self, name: str, meaning: str, choices: Sequence[str]) -> flags.FlagHolder:
        """Defines a flag with one of these values, the first by default."""
        return flags.DEFINE_enum(name, choices[0], choices, meaning, flag_values=self)

    def define_integer(
        self,
        name: str,
        meaning: str,
        default: int | None = None,
        least: int | None = None,
        most: int | None = None,
    ) -> flags.FlagHolder:
        """Defines a flag whose value is an integer, or None if that is the default."""
        return flags.DEFINE_integer(name, default, meaning, least, most, flag_values=self)

    def define_number(
        self,
        name: str,
        meaning: str,
        default: float,
        least: float | None = None,
        most: float | None = None,
    ) -> flags.FlagHolder:
        """Defines a flag whose value is a float."""
        return flags.DEFINE_float(name, default, meaning, least, most, flag_values=self)

    def define_switch(self, name: str, meaning: str) -> flags.FlagHolder:
        """Defines a flag that is off by default."""
        return flags.DEFINE_bool(name, False, meaning, flag_values=self)

    def define_config(self, meaning: str, default: str | None = None) -> flags.FlagHolder:
        """Defines `--config`, whose value is the ConfigDict of a file, and `--config.KEY`."""
        meaning += " --help=keys prints all keys, --help=KEY one of them."
        try:
            config = config_flags.DEFINE_config_file("config", default, meaning, flag_values=self)
        except flags.CantOpenFlagFileError as error:  # it looks for --config there, too
            sys.stderr.write(f"error: --flagfile: {error.__context__}; give a file of flags\n")
            sys.exit(2)
        self["config"].parser = _ConfigParser()
        return config

    def define_workdir(self) -> flags.FlagHolder:
        """Defines `--workdir` of a run that exists."""
        return self.define_text("workdir", "Folder of the run.")

    def define_num_steps(self) -> flags.FlagHolder:
        """Defines `--num_steps`, which is a number or None."""
        meaning = "Number of solver steps, or layers. [default: the trained one]"
        return self.define_integer("num_steps", meaning, None, 1, STEPS)

    def define_checkpoint(self) -> flags.FlagHolder:
        """Defines `--checkpoint`, whose value is a step, "best" or None."""
        meaning = (
            "Step of the checkpoint, or best: the one with the lowest evaluation loss. "
            "[default: the newest]"
        )
        return flags.DEFINE(_CheckpointParser(), "checkpoint", None, meaning, flag_values=self)

    def define_averages(self) -> flags.FlagHolder:
        """Defines `--averages`."""
        meaning = "Take the moving averages of the parameters (train.ema_decay)."
        return self.define_switch("averages", meaning)

    def define_prompts(self, what: str) -> flags.FlagHolder:
        """Defines `--prompt`, whose value is a list; `what` says what the texts are for."""
        meaning = f"{what}; may be repeated. [default: the start of the validation text]"
        return self.define_texts("prompt", meaning)

    def define_plot(self, what: str) -> flags.FlagHolder:
        """Defines `--plot`, for `flag_values.check_plot`; `what` says what is plotted."""
        return self.define_text("plot", f"File for a plot of {what}: .png, .pdf or .svg.")

    def define_part(self) -> flags.FlagHolder:
        """Defines `--part`, for `flag_values.parse_part`."""
        meaning = "Do only part i of n, as i/n, for an array of jobs."
        return self.define_text("part", meaning, "0/1")

    def define_dry_run(self) -> flags.FlagHolder:
        """Defines `--dry_run`."""
        return self.define_switch("dry_run", "Print the commands without running them.")


class _ConfigParser(flags.ArgumentParser):
    def parse(self, argument: str) -> ConfigDict:
        """The config of a file; an InputError if the file has a mistake."""
        return read_config_file(argument).lock()


class WordsParser(flags.ArgumentParser):
    """Parses the words of a list, separated by commas or white space."""

    def parse(self, argument: str | list[str]) -> list[str]:
        """The words; `command_line` refuses an empty one."""
        return split_words(argument) if isinstance(argument, str) else argument


class _CheckpointParser(flags.ArgumentParser):
    def parse(self, argument: str | int) -> int | str:
        """The step, or "best"; raises a ValueError, as absl expects, for anything else."""
        text = str(argument)
        if text == BEST:
            return BEST
        if not (text.isdecimal() and int(text) <= INT32):
            raise ValueError(
                f"it must be a step, from 0 to {INT32}, or {BEST}; for the newest, leave it out"
            )
        return int(text)

    def flag_type(self) -> str:
        """What `--help` calls the type."""
        return f"a step or {BEST}"
