"""Says how a run is doing, or all runs of a folder: --workdir=DIR, here or in a bucket.

Prints how far it is, its losses, where its time went in each attempt, its goodput, and when it will
be done; with --json one JSON object per run instead. It only reads, also while the run trains.
"""

from absl import flags

from t5x_diffeq.runtime import command_line

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a run, or a folder of several runs' folders.", flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "Print a JSON object per run.", flag_values=FLAGS)


def main() -> int:
    """The verb."""
    workdir = command_line.parse_folder(_WORKDIR, "status")

    from t5x_diffeq.verbs.status import show_status  # JAX takes seconds

    show_status(workdir, as_json=_JSON.value)
    return 0


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
