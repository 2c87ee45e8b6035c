"""Analyses a trained run: analyze KIND --workdir=DIR [--output=DIR].

KIND is spectra, lyapunov, clustering or all. With --interactive it also writes explore.html: one
file that shows a text at several depths, token by token, without a server.
Writes arrays, figures (PNG and PDF) and one page that shows them: report.html for `all`, otherwise
spectra.html and so on. Prints how spectra grow with depth as JSON, and then the path of the page.
Needs matplotlib: pip install 't5x_diffeq[analysis]'. Clustering simulates particles
independently of a run; with --output it needs no --workdir.
"""

import sys

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.extras import need_package
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.runtime.keys.values import CONVENTIONS

_KINDS = ("spectra", "lyapunov", "clustering")
CHOICES = {"": (*_KINDS, "all"), "convention": CONVENTIONS}  # for completion

FLAGS = flags.FlagValues()
_WHAT = flags.DEFINE_string(
    "what",
    None,
    "The analysis: spectra, lyapunov, clustering or all; --what= may be omitted.",
    flag_values=FLAGS,
)
_WORKDIR = run_flags.define_workdir(FLAGS)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for the results. [default: WORKDIR/analysis]", flag_values=FLAGS
)
run_flags.define_prompts(FLAGS, "Text whose tokens are analysed")
_CONVENTION = flags.DEFINE_string(
    "convention",
    "pair",
    "Definition of the Lyapunov exponents: pair, official or full.",
    flag_values=FLAGS,
)
_TIMES = flags.DEFINE_integer(
    "times",
    201,
    "Number of times at which the spectra of an ODE are computed.",
    2,
    100_000,
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    "seeds", 20, "Number of random draws of the clustering.", 1, 100_000, flag_values=FLAGS
)
run_flags.define_num_steps(FLAGS)
_INTERACTIVE = flags.DEFINE_bool(
    "interactive",
    False,
    "Also write explore.html: the page of `explore`, for the first prompt, as one file. KIND can "
    "then be omitted.",
    flag_values=FLAGS,
)
run_flags.define_checkpoint(FLAGS)


def _check_flags() -> None:
    only_page = _INTERACTIVE.value and not _WHAT.value
    if not only_page and _WHAT.value not in (*_KINDS, "all"):
        what = f"not {_WHAT.value!r}" if _WHAT.value else "as its first argument"
        raise InputError(f"analyze takes {', '.join(_KINDS)} or all, {what}")
    if _CONVENTION.value not in CONVENTIONS:
        raise InputError(
            f"--convention={_CONVENTION.value} is unknown; there are {', '.join(CONVENTIONS)}"
        )
    need_package("matplotlib", "analyze")


def _output_folder() -> AnyPath:
    if _OUTPUT.value:
        return command_line.parse_folder(_OUTPUT, "analyze")
    return command_line.parse_folder(_WORKDIR, "analyze") / "analysis"


def name_what(arguments: list[str]) -> list[str]:
    """`analyze spectra` means `analyze --what=spectra`."""
    program, *rest = arguments
    if rest and not rest[0].startswith("-"):
        rest[0] = f"--what={rest[0]}"
    return [program, *rest]


def main() -> None:
    """Runs the verb."""
    _check_flags()
    folder = _output_folder()
    kinds = [kind for kind in _KINDS if _WHAT.value in (kind, "all")]
    workdir = (
        command_line.parse_folder(_WORKDIR, "analyze")
        if set(kinds) - {"clustering"} or _INTERACTIVE.value
        else None
    )

    from t5x_diffeq.verbs.analyze import analyze  # importing JAX takes seconds

    analyze(kinds, workdir, folder, FLAGS)


if __name__ == "__main__":
    sys.argv = name_what(sys.argv)
    command_line.run(main, __doc__, FLAGS)
