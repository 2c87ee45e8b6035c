"""Analyses of a run, each written as a section of one page."""

import datetime
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl.flags import FlagValues

from t5x_diffeq.analysis.report import Section, write_report
from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.split_loss import evaluate_split
from t5x_diffeq.inference.trained_run import TrainedRun
from t5x_diffeq.ode.sources import source_of
from t5x_diffeq.runs.load import Run, load_run
from t5x_diffeq.runs.workdir import read_config
from t5x_diffeq.runtime.console import Progress, format_count, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, absolute_path
from t5x_diffeq.runtime.version import __version__
from t5x_diffeq.tracking.jsonl import read_metrics

_OPENING = 24  # tokens of the validation text that form the prompt if none is given
_EVAL_BATCH_SIZE = 32  # sequences per batch, for the perplexity between the nodes


def perplexity(run: Run, corpus: Corpus, num_steps: int) -> float:
    """The perplexity on the whole validation split with N solver steps, as in `evaluate`."""
    return evaluate_split(run.at_depth(num_steps), corpus, _EVAL_BATCH_SIZE)["perplexity"]


def _encode_prompt(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
    """A prompt's tokens."""
    try:
        (tokens,) = tokenizer.encode([text])
    except UnicodeEncodeError as error:
        raise InputError(f"--prompt={text!r} is not UTF-8 text") from error
    if not 1 <= len(tokens) <= limit:
        raise InputError(
            f"--prompt has {len(tokens)} tokens; the model takes 1 to {limit}: change the prompt"
        )
    return tokens.tolist()


def _make_spectra_section(corpus: Corpus, run: Run, params: dict, flags: FlagValues) -> Section:
    from t5x_diffeq.analysis.spectra_section import spectra_section

    model = run.placed.model
    steps = [1, 2] if source_of(model.config).any_time else []
    own = model.config.num_steps
    perplexities = {own * n: perplexity(run, corpus, own * n) for n in steps}
    with Progress("eigenvalues"):
        return spectra_section(model, params, flags.times, perplexities)


def _make_lyapunov_section(corpus: Corpus, run: Run, params: dict, flags: FlagValues) -> Section:
    from t5x_diffeq.analysis.lyapunov_section import lyapunov_section

    prompts = _prompts_of(corpus, run, flags.prompt)
    texts = [corpus.tokenizer.pieces(prompt) for prompt in prompts]
    return lyapunov_section(run.placed.model, params, prompts, texts, flags.convention)


def _prompts_of(corpus: Corpus, run: Run, given: list[str] | None) -> list[list[int]]:
    limit = run.placed.model.config.max_length
    opening = corpus.parts[0].validation[0][: min(_OPENING, limit)]
    return [_encode_prompt(corpus.tokenizer, text, limit) for text in given or ()] or [
        [int(token) for token in opening]
    ]


def analyze(
    kinds: Sequence[str], workdir: AnyPath | None, folder: AnyPath, flags: FlagValues
) -> None:
    """Writes a page with these kinds of analyses and prints its path.

    Args:
      kinds: any of spectra, lyapunov and clustering.
      workdir: the run's workdir; None if the only kind is clustering, which needs no run.
      folder: the folder to write to.
      flags: the verb's flags.
    """
    facts: dict[str, object] = {}
    sections = []
    if workdir is not None:
        corpus = load_corpus(workdir)
        vocab_size = corpus.tokenizer.vocab_size
        run = load_run(
            workdir,
            vocab_size,
            batch_size=1,
            checkpoint=flags.checkpoint,
            grids=[(flags.num_steps, None)],
            methods=("spectral_factors",) if "spectra" in kinds else (),
        )
        trained, run = run, run.at_depth(flags.num_steps)
        facts = facts_of(workdir, run)
        params = jax.tree.map(jnp.asarray, jax.device_get(run.params))  # off the mesh
        if "spectra" in kinds:
            say("spectra")
            sections.append(_make_spectra_section(corpus, run, params, flags))
        if "lyapunov" in kinds:
            say("Lyapunov exponents")
            sections.append(_make_lyapunov_section(corpus, run, params, flags))
    if "clustering" in kinds:
        from t5x_diffeq.analysis.clustering_section import clustering_section

        sections.append(clustering_section(flags.seeds))
    if flags.interactive:
        print(_write_page(corpus, trained, workdir, folder, flags), flush=True)
        if not kinds:
            return
    if numbers := {key: value for each in sections for key, value in each.numbers.items()}:
        print(json.dumps(numbers))
    page, title = f"{flags.what}.html", flags.what.capitalize()
    if flags.what == "all":
        page, title = "report.html", "Analysis"
    title += f" of {absolute_path(workdir).name}" if workdir is not None else ""
    print(write_report(folder, page, title, facts | facts_today(), sections), flush=True)


def _write_page(
    corpus: Corpus, run: Run, workdir: AnyPath, folder: AnyPath, flags: FlagValues
) -> AnyPath:
    from t5x_diffeq.explorer.answers import Explorer
    from t5x_diffeq.explorer.recording import write_recording

    name = absolute_path(workdir).name or "run"
    write_recording(
        folder / "explore.html",
        Explorer(name, TrainedRun(run, corpus, workdir, read_config(workdir))),
        flags.prompt[0] if flags.prompt else None,
    )
    return folder / "explore.html"


def facts_of(workdir: AnyPath, run: Run) -> dict[str, object]:
    """The description of a run on its page; the loss is the last that training recorded."""
    c = run.placed.model.config
    facts: dict[str, object] = {
        "run": str(absolute_path(workdir)),
        "checkpoint": f"step {run.step}",
        "model": f"{c.block or c.architecture}, {c.weights} weights, {c.num_steps} steps of "
        f"{c.scheme}, step size {c.step_size}, width {c.embed_dim}, {c.num_heads} heads",
        "parameters": format_count(sum(leaf.size for leaf in jax.tree.leaves(run.params))),
    }
    recorded = [row for row in read_metrics(workdir) if "eval/loss" in row]
    if upto := [row for row in recorded if row["step"] <= run.step]:
        last = upto[-1]
        facts["validation loss"] = (
            f"{last['eval/loss']:.4g} nats per token (perplexity {last['eval/perplexity']:.4g}), "
            f"as training recorded at step {last['step']}"
        )
    return facts


def facts_today() -> dict[str, object]:
    """When a page was made, and by which versions."""
    return {
        "made": f"on {datetime.date.today()} by t5x_diffeq {__version__} and jax {jax.__version__}"
    }
