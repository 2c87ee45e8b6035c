"""Analyses a trained run: analyze KIND --workdir=DIR [--output=DIR].

KIND is spectra, lyapunov, clustering or all. With --interactive it also writes explore.html: one
file that shows a text at several depths, token by token, without a server.
Writes arrays, figures (PNG and PDF) and one page that shows them: report.html for `all`, otherwise
spectra.html and so on. Each analysis is written once it is done, and the page names the analyses
that are still missing. Prints how spectra grow with depth as JSON, and then the path of the page.
Needs matplotlib: pip install -e '.[analysis]'. Clustering simulates particles
independently of a run; with --output it needs no --workdir.
"""

import datetime
import json
from collections.abc import Callable
from functools import partial

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.keys.values import CONVENTIONS
from t5x_diffeq.system.console import Progress, format_count, log, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import __version__, need_package
from t5x_diffeq.system.files import AnyPath, absolute_path, make_folder

_KINDS = {"spectra": "Spectra", "lyapunov": "Lyapunov exponents", "clustering": "Clustering"}
_OPENING = 24  # tokens of the validation text that form the prompt if none is given
_EVAL_BATCH_SIZE = 32  # sequences per batch, for the perplexity between the nodes

FLAGS = VerbFlags(__name__, positional="what")
_WHAT = FLAGS.define_text(
    "what", "The analysis: spectra, lyapunov, clustering or all; --what= may be omitted."
)
_WORKDIR = FLAGS.define_workdir()
_OUTPUT = FLAGS.define_text("output", "Folder for the results. [default: WORKDIR/analysis]")
_PROMPT = FLAGS.define_prompts("Text whose tokens are analysed")
_CONVENTION = FLAGS.define_text(
    "convention", "Definition of the Lyapunov exponents: pair, official or full.", "pair"
)
_TIMES = FLAGS.define_integer(
    "times", "Number of times at which the spectra of an ODE are computed.", 201, 2, 100_000
)
_SEEDS = FLAGS.define_integer("seeds", "Number of random draws of the clustering.", 20, 1, 100_000)
_NUM_STEPS = FLAGS.define_num_steps()
_INTERACTIVE = FLAGS.define_switch(
    "interactive",
    "Also write explore.html: the page of `explore`, for the first prompt, as one file. KIND can "
    "then be omitted.",
)
_CHECKPOINT = FLAGS.define_checkpoint()
_OF_ONE_KIND = (
    *((_PROMPT, "lyapunov"), (_CONVENTION, "lyapunov")),
    *((_TIMES, "spectra"), (_SEEDS, "clustering")),
)
_OF_RUNS = (_NUM_STEPS, _CHECKPOINT)  # clustering simulates without a run


def _check_flags() -> None:
    only_page = _INTERACTIVE.value and not _WHAT.value
    if not only_page and _WHAT.value not in (*_KINDS, "all"):
        what = f"not {_WHAT.value!r}" if _WHAT.value else "as its first argument"
        raise InputError(f"analyze takes {', '.join(_KINDS)} or all, {what}")
    for flag, kind in _OF_ONE_KIND:
        if flag.present and _WHAT.value not in (kind, "all") and not _INTERACTIVE.value:
            raise InputError(
                f"--{flag.name} is for analyze {kind}; leave it out, or analyze {kind} or all"
            )
    for flag in _OF_RUNS:
        if flag.present and _WHAT.value == "clustering" and not _INTERACTIVE.value:
            raise InputError(f"--{flag.name} is of a run, and clustering reads none; leave it out")
    if _CONVENTION.value not in CONVENTIONS:
        raise InputError(
            f"--convention={_CONVENTION.value} is unknown; there are {', '.join(CONVENTIONS)}"
        )
    need_package("matplotlib", "analyze")


def main() -> None:
    """Runs the verb."""
    _check_flags()
    if _OUTPUT.value:
        folder = flag_values.parse_folder(_OUTPUT, "analyze")
    else:
        folder = flag_values.parse_folder(_WORKDIR, "analyze") / "analysis"
    kinds = [kind for kind in _KINDS if _WHAT.value in (kind, "all")]
    workdir = (
        flag_values.parse_folder(_WORKDIR, "analyze")
        if set(kinds) - {"clustering"} or _INTERACTIVE.value
        else None
    )

    import jax  # which takes seconds
    import jax.numpy as jnp

    from t5x_diffeq.analysis.lyapunov import check_exponents_exist
    from t5x_diffeq.analysis.report import Analysis, write_report, write_section
    from t5x_diffeq.data.corpus import load_corpus
    from t5x_diffeq.training.load import load_run

    facts: dict[str, object] = {}
    make: dict[str, Callable[[], Analysis]] = {"clustering": _make_clustering_section}
    if workdir is not None:
        corpus = load_corpus(workdir)
        vocab_size = corpus.tokenizer.vocab_size
        run = load_run(
            workdir,
            vocab_size,
            batch_size=1,
            checkpoint=_CHECKPOINT.value,
            grids=[(_NUM_STEPS.value, None)],
            methods=("spectral_factors",) if "spectra" in kinds else (),
        )
        trained, run = run, run.at_depth(_NUM_STEPS.value)
        if "lyapunov" in kinds:
            check_exponents_exist(run.placed.model.config)
        facts = _facts_of(workdir, run)
        params = jax.tree.map(jnp.asarray, jax.device_get(run.params))  # off the mesh
        make["spectra"] = partial(_make_spectra_section, corpus, run, params)
        make["lyapunov"] = partial(_make_lyapunov_section, corpus, run, params)
    make_folder(folder, "--output")
    page, title = f"{_WHAT.value}.html", f"{_WHAT.value}".capitalize()
    if _WHAT.value == "all":
        page, title = "report.html", "Analysis"
    title += f" of {absolute_path(workdir).name}" if workdir is not None else ""
    maker = f"on {datetime.date.today()} by t5x_diffeq {__version__} and jax {jax.__version__}"
    sections: list[Analysis] = []
    for n, kind in enumerate(kinds, 1):
        log(_KINDS[kind])
        sections.append(make[kind]())
        write_section(folder, sections[-1], facts)
        missing = [_KINDS[other] for other in kinds[n:]]
        write_report(folder, page, title, {**facts, "made": maker}, sections, missing)
    if _INTERACTIVE.value:
        print_result(_write_page(corpus, trained, workdir, folder))
    if not kinds:
        return
    if numbers := {key: value for each in sections for key, value in each.numbers.items()}:
        print_result(json.dumps(numbers))
    print_result(folder / page)


def _make_spectra_section(corpus, run, params: dict):
    from t5x_diffeq.analysis.spectra_section import spectra_section
    from t5x_diffeq.inference.validation import evaluate_split

    model, num_steps = run.placed.model, run.placed.model.config.num_steps
    perplexities = {
        n: evaluate_split(run.at_depth(n), corpus, _EVAL_BATCH_SIZE)["perplexity"]
        for n in ((num_steps, 2 * num_steps) if model.config.any_num_steps else ())
    }
    with Progress("eigenvalues"):
        return spectra_section(model, params, _TIMES.value, perplexities)


def _make_lyapunov_section(corpus, run, params: dict):
    from t5x_diffeq.analysis.lyapunov_section import lyapunov_section

    limit = run.placed.model.config.max_length
    texts = _PROMPT.value or [corpus.opening(min(_OPENING, limit - 1))]
    prompts = [corpus.tokenizer.read(text, "--prompt", limit) for text in texts]
    pieces = [corpus.tokenizer.pieces(prompt) for prompt in prompts]
    return lyapunov_section(run.placed.model, params, prompts, pieces, _CONVENTION.value)


def _make_clustering_section():
    from t5x_diffeq.analysis.clustering_section import clustering_section

    return clustering_section(_SEEDS.value)


def _write_page(corpus, run, workdir: AnyPath, folder: AnyPath) -> AnyPath:
    from t5x_diffeq.checkpoints.workdir import read_config
    from t5x_diffeq.inference.explorer.answers import Explorer
    from t5x_diffeq.inference.explorer.recording import write_recording
    from t5x_diffeq.inference.trained_run import TrainedRun

    name = absolute_path(workdir).name or "run"
    write_recording(
        folder / "explore.html",
        Explorer(name, TrainedRun(run, corpus, workdir, read_config(workdir))),
        _PROMPT.value[0] if _PROMPT.value else None,
    )
    return folder / "explore.html"


def _facts_of(workdir: AnyPath, run) -> dict[str, object]:
    """The facts of a run that its page shows; the loss is the last one recorded up to its step."""
    import jax

    from t5x_diffeq.training.tracking.jsonl import read_metrics

    c = run.placed.model.config
    facts: dict[str, object] = {
        "run": str(absolute_path(workdir)),
        "checkpoint": f"step {run.step}",
        "model": f"{c.block or c.architecture}, {c.weights} weights, {c.num_steps} steps of "
        f"{c.scheme}, step size {c.step_size}, width {c.embed_dim}, {c.num_heads} heads",
        "parameters": format_count(sum(leaf.size for leaf in jax.tree.leaves(run.params))),
    }
    recorded = read_metrics(workdir, "eval/loss")
    if upto := [row for row in recorded if row["step"] <= run.step]:
        last = upto[-1]
        facts["validation loss"] = (
            f"{last['eval/loss']:.4g} nats per token (perplexity {last['eval/perplexity']:.4g}), "
            f"as training recorded at step {last['step']}"
        )
    return facts
