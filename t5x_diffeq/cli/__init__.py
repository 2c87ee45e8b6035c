"""The command line: the flags of each verb, in a file of its name.

`python -m t5x_diffeq VERB` and `python -m t5x_diffeq.VERB` run the same file: the package looks for
its modules in this folder, too. No file imports JAX before its flags are checked.
"""

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
    "make_tasks",
)
