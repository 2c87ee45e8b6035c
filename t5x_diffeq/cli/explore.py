"""Serves a page that shows a run at any depth: --workdir=DIR [--workdir=DIR ...].

Prints the page's address, and serves it until Ctrl-C. The page shows the loss of each token of a
text, what each node predicts, and a continuation. Several runs are compared side by side.
Its endpoints are described in docs/depth.md.
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
    "Address to listen on; 0.0.0.0 also serves other machines.",
    flag_values=FLAGS,
)
_PORT = flags.DEFINE_integer(
    "port", 8765, "Port to listen on; 0 takes a free one.", 0, 65535, flag_values=FLAGS
)
run_flags.define_checkpoint(FLAGS)
run_flags.define_averages(FLAGS)


def main() -> int:
    """Runs the verb."""
    workdirs = command_line.parse_folders(_WORKDIR, "explore")
    for package in ("starlette", "uvicorn"):
        need_package(package, "explore")

    from t5x_diffeq.verbs.explore import explore  # importing JAX takes seconds

    return explore(workdirs, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
