"""The command line: a file for each verb, with its flags and then its work.

`python -m t5x_diffeq.VERB` and `t5x_diffeq VERB` run its `main`. No file imports JAX before its
flags are checked.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module

from t5x_diffeq.system.failed_imports import IMPORT_ERRORS, explain_import

VERBS = (
    "train",
    "finetune",
    "evaluate",
    "generate",
    "explore",
    "status",
    "prepare_data",
    "benchmark",
    "plan",
    "analyze",
    "export",
    "convert",
    "sweep",
    "reproduce",
)
_SEVERAL = ("train", "finetune", "evaluate")  # verbs that several processes can run together


def run_verb(verb: str, name: str = "__main__") -> None:
    """Runs a verb with the arguments in `sys.argv`, and exits.

    Args:
      name: the `__name__` of the module that calls this. A process that the verb starts imports
        that module, too, and there this does nothing.

    Raises:
      ImportError: if the module is imported by its name, because `t5x_diffeq.train` is a function.
    """
    if name == f"t5x_diffeq.{verb}" and sys.argv[0] == "-m":  # Python looks for what is in it
        sys.stderr.write(f"error: {name} is a verb, and no package; write python -m {name}\n")
        sys.exit(2)
    if name == f"t5x_diffeq.{verb}":
        raise ImportError(f"{name} is only for `python -m`; import t5x_diffeq.cli.{verb} instead")
    if name != "__main__":
        return
    _keep_children_from_current_folder()
    try:
        from t5x_diffeq.cli import command_line

        module = import_module(f"t5x_diffeq.cli.{verb}")
    except IMPORT_ERRORS as error:
        if (why := explain_import(error)) is None:
            raise
        sys.stderr.write(f"error: {why}\n")
        sys.exit(2)
    sys.argv = module.FLAGS.name_positional(sys.argv)
    try:
        command_line.run(module.main, module.__doc__ or "", module.FLAGS, several=verb in _SEVERAL)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        command_line.exit_process(ended.code)


def _keep_children_from_current_folder() -> None:
    """Keeps the processes that this one starts from importing what lies in the current folder.

    Python puts that folder first on their path, unless PYTHONSAFEPATH is set. The variable stays as
    it is if this process itself imports from the current folder, as `python -m` does.
    """
    with suppress(FileNotFoundError):  # the folder was deleted
        if sys.path[0] != os.getcwd():
            os.environ["PYTHONSAFEPATH"] = "1"
