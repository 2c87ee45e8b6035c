"""Shows a trained run as a page with its depth as a slider: --workdir=DIR [--workdir=DIR ...].

Prints the page's address, and answers until Ctrl-C. The page reads a text at any depth: its loss
token by token, what each node predicts, and how it goes on. Several runs are compared side by side.
Its endpoints, among them OpenAI's /v1/completions, are described in docs/depth.md.
Needs Starlette and uvicorn: pip install 't5x_diffeq[explore]'.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.extras import need_package

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "Folder of a run; may be repeated.", flag_values=FLAGS
)
_HOST = flags.DEFINE_string(
    "host",
    "127.0.0.1",
    "Address of this machine at which to answer; 0.0.0.0 also answers other machines.",
    flag_values=FLAGS,
)
_PORT = flags.DEFINE_integer(
    "port", 8765, "Port at which to answer; 0 takes one that is free.", 0, 65535, flag_values=FLAGS
)
run_flags.define_checkpoint(FLAGS)
run_flags.define_averages(FLAGS)


def main() -> int:
    """The verb."""
    workdirs = command_line.parse_folders(_WORKDIR, "explore")
    for package in ("starlette", "uvicorn"):
        need_package(package, "explore")

    from t5x_diffeq.verbs.explore import explore  # JAX and the rest take seconds

    return explore(workdirs, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
