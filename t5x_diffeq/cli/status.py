"""Shows the progress of a run, or of all runs in a folder: --workdir=DIR, here or in a bucket.

Prints its step, its losses, how each attempt spent its time, its goodput, and when it will finish;
with --json one JSON object per run instead. It changes nothing, also while the run trains.
"""

from absl import flags

from t5x_diffeq.runtime import command_line

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a run, or a folder of several runs' folders.", flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "Print a JSON object per run.", flag_values=FLAGS)


def main() -> int:
    """Runs the verb."""
    workdir = command_line.parse_folder(_WORKDIR, "status")

    from t5x_diffeq.verbs.status import show_status  # importing JAX takes seconds

    show_status(workdir, as_json=_JSON.value)
    return 0


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
