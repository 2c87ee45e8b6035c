"""Analyses a trained run: analyze spectra|lyapunov|clustering|all --workdir=DIR [--output=DIR].

Writes arrays, figures (PNG and PDF) and a page that shows them all: report.html for `all`, else
spectra.html and so on. Prints how spectra grow with depth, as JSON, and then the page's path. Needs
matplotlib: pip install -e '.[analysis]'. Clustering is of particles, not of the run: with --output
it needs no --workdir.
"""

import importlib
import json
import sys
from itertools import islice, pairwise

import jax
import jax.numpy as jnp
from absl import flags

from t5x_diffeq import __version__, command_line
from t5x_diffeq.analysis.lyapunov import CONVENTIONS
from t5x_diffeq.analysis.report import Section, write_report
from t5x_diffeq.config_keys import INT32, STEPS
from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.data.pipeline import eval_batches
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import AnyPath, absolute
from t5x_diffeq.report import say
from t5x_diffeq.training.evaluation import evaluate
from t5x_diffeq.training.run import Run, load_run
from t5x_diffeq.training.step import make_eval_step

KINDS = ("spectra", "lyapunov", "clustering")
OPENING = 24  # tokens of the validation text that are the prompt if none is given
BATCHES = 4  # of 8 sequences, for the perplexity between the nodes

FLAGS = flags.FlagValues()
WHAT = flags.DEFINE_string(
    "what",
    None,
    "spectra, lyapunov, clustering or all; its name may be left out.",
    flag_values=FLAGS,
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for what is written; WORKDIR/analysis.", flag_values=FLAGS
)
PROMPT = flags.DEFINE_multi_string(
    "prompt",
    None,
    "Text whose tokens' influence is measured, once for each; the validation text's opening.",
    flag_values=FLAGS,
)
CONVENTION = flags.DEFINE_string(
    "convention", "pair", "Of Lyapunov exponents: pair, official or full.", flag_values=FLAGS
)
MEMORY = flags.DEFINE_float(
    "memory", 1.0, "GiB that Lyapunov's tangents may take, about.", flag_values=FLAGS
)
TIMES = flags.DEFINE_integer(
    "times",
    201,
    "Times at which an ODE's spectra are taken between its nodes.",
    2,
    100_000,
    flag_values=FLAGS,
)
SEEDS = flags.DEFINE_integer("seeds", 20, "Draws of the clustering.", 1, 100_000, flag_values=FLAGS)
NUM_STEPS = flags.DEFINE_integer(
    "num_steps", None, "Number of steps; the trained one.", 1, STEPS, flag_values=FLAGS
)
CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "Step of the checkpoint; the newest.", 0, INT32, flag_values=FLAGS
)


def check_flags() -> None:
    """Flags are in their ranges, and matplotlib is there.

    Raises:
      InputError: if not.
    """
    if WHAT.value not in (*KINDS, "all"):
        what = f"not {WHAT.value!r}" if WHAT.value else "as its first argument"
        raise InputError(f"analyze takes {', '.join(KINDS)} or all, {what}")
    if CONVENTION.value not in CONVENTIONS:
        raise InputError(
            f"--convention={CONVENTION.value} is unknown; there are {', '.join(CONVENTIONS)}"
        )
    if not MEMORY.value > 0:
        raise InputError(f"--memory={MEMORY.value} must be above 0, in GiB")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise InputError("analyze needs matplotlib: pip install -e '.[analysis]'") from error


def output_folder() -> AnyPath:
    """Where to write: --output, or a folder of the run."""
    if OUTPUT.value:
        return command_line.folder(OUTPUT, "analyze")
    return command_line.folder(WORKDIR, "analyze") / "analysis"


def load(workdir: AnyPath, num_steps: int | None) -> tuple[Corpus, Run]:
    """The run on one device, and its data."""
    corpus = load_corpus(workdir)
    vocab_size = corpus.tokenizer.vocab_size
    grid = {"num_steps": num_steps, "checkpoint": CHECKPOINT.value}
    return corpus, load_run(workdir, vocab_size, batch_size=1, **grid)


def perplexity(workdir: AnyPath, num_steps: int) -> float:
    """On the first sequences of the validation split, with so many steps."""
    corpus, run = load(workdir, num_steps)
    parts = eval_examples(run.config.data, corpus)
    with run.setup.context():
        rows = run.setup.eval_rows(min(8, sum(map(len, parts))))
        batches = islice(eval_batches(parts, rows, run.setup.rows), BATCHES)
        step = make_eval_step(run.setup.model, run.setup.loss_chunk)
        return evaluate(step, run.params, batches)["perplexity"]


def encode(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
    """A prompt's tokens.

    Raises:
      InputError: if there are none, or more than the model takes.
    """
    try:
        (tokens,) = tokenizer.encode([text])
    except UnicodeEncodeError as error:
        raise InputError(f"--prompt={text!r} is not UTF-8 text") from error
    if not 1 <= len(tokens) <= limit:
        raise InputError(
            f"--prompt has {len(tokens)} tokens; the model takes 1 to {limit}: change the prompt"
        )
    return tokens.tolist()


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The text that each token adds to those before it."""
    texts = [tokenizer.decode(tokens[:end]) for end in range(len(tokens) + 1)]
    return [after[len(before) :] for before, after in pairwise(texts)]


def spectra(workdir: AnyPath, run: Run, params: dict) -> Section:
    """The section on spectra."""
    from t5x_diffeq.analysis.spectra_section import spectra_section

    model = run.setup.model
    steps = [] if model.config.weights == "per_layer" else [1, 2]
    own = model.config.num_steps
    perplexities = {own * n: perplexity(workdir, own * n) for n in steps}
    return spectra_section(model, params, TIMES.value, perplexities)


def lyapunov(prompts: list[list[int]], corpus: Corpus, run: Run, params: dict) -> Section:
    """The section on Lyapunov exponents."""
    from t5x_diffeq.analysis.lyapunov_section import lyapunov_section

    texts = [pieces(corpus.tokenizer, prompt) for prompt in prompts]
    return lyapunov_section(run.setup.model, params, prompts, texts, CONVENTION.value, MEMORY.value)


def prompts_of(corpus: Corpus, run: Run) -> list[list[int]]:
    """The prompts' tokens."""
    limit = run.setup.model.config.max_length
    opening = corpus.parts[0].validation[0][: min(OPENING, limit)]
    return [encode(corpus.tokenizer, text, limit) for text in PROMPT.value or ()] or [
        [int(token) for token in opening]
    ]


def main() -> None:
    """The verb."""
    check_flags()
    folder = output_folder()
    kinds = KINDS if WHAT.value == "all" else (WHAT.value,)
    facts: dict[str, object] = {"t5x_diffeq": __version__, "jax": jax.__version__}
    sections = []
    if set(kinds) - {"clustering"}:
        workdir = command_line.folder(WORKDIR, "analyze")
        corpus, run = load(workdir, NUM_STEPS.value)
        facts |= facts_of(workdir, run)
        params = jax.tree.map(jnp.asarray, jax.device_get(run.params))  # off the mesh
        prompts = prompts_of(corpus, run)
        if "spectra" in kinds:
            say("spectra")
            sections.append(spectra(workdir, run, params))
        if "lyapunov" in kinds:
            say("Lyapunov exponents")
            sections.append(lyapunov(prompts, corpus, run, params))
    if "clustering" in kinds:
        from t5x_diffeq.analysis.clustering_section import clustering_section

        sections.append(clustering_section(SEEDS.value))
    if numbers := {key: value for each in sections for key, value in each.numbers.items()}:
        print(json.dumps(numbers))
    page = "report.html" if WHAT.value == "all" else f"{WHAT.value}.html"
    print(write_report(folder, page, f"Analysis: {WHAT.value}", facts, sections), flush=True)


def facts_of(workdir: AnyPath, run: Run) -> dict[str, object]:
    """What was analysed."""
    c = run.setup.model.config
    return {
        "run": str(absolute(workdir)),
        "checkpoint": run.step,
        "model": f"{c.architecture}, {c.weights} weights, {c.num_steps} steps of {c.scheme}, "
        f"step size {c.step_size}, width {c.embed_dim}, {c.num_heads} heads",
    }


def name_what(arguments: list[str]) -> list[str]:
    """`analyze spectra` means `analyze --what=spectra`."""
    program, *rest = arguments
    if rest and not rest[0].startswith("-"):
        rest[0] = f"--what={rest[0]}"
    return [program, *rest]


if __name__ == "__main__":
    sys.argv = name_what(sys.argv)
    command_line.run(main, __doc__, FLAGS)
