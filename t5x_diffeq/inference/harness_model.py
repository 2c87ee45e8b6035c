"""A trained run as a model of lm-evaluation-harness, which makes three kinds of requests.

With several processes, all of them answer every request together, so the harness sees one model.
The harness divides long texts into windows: they are consecutive, each of the model's full length,
and the last one begins earlier to be as long. Each token is predicted once, and the first token of
a text from the token that opens documents.
"""

import zlib
from collections import Counter, defaultdict
from math import fsum

import jax
import jax.numpy as jnp
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.sampling import BUCKET, Continuation, Sampling, generate, grow
from t5x_diffeq.inference.scoring import Scorer, Sequel
from t5x_diffeq.system.console import Progress
from t5x_diffeq.training.placed_model import PlacedModel

_SEED = 0  # for sampling


class DiffEqLM(TemplateLM):
    """A model on its devices, behind the harness's interface.

    Args:
      batch_size: sequences of the model's full length per batch.
      facts: what the harness's results record about the model.
    """

    def __init__(
        self, placed: PlacedModel, params: dict, tokenizer: Tokenizer, batch_size: int, facts: dict
    ):
        super().__init__()
        self.placed, self.params = placed.with_whole_rows(), params
        self.text, self.facts = tokenizer, facts
        self.batch_size, self.max_length = batch_size, placed.model.config.max_length
        self.score = Scorer(placed, params, batch_size)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.text.border.end

    @property
    def prefix_token_id(self) -> int:
        """The token that opens a document."""
        return self.text.border.opener

    def get_model_info(self) -> dict:
        """What the harness records about the model."""
        return self.facts

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """The tokens of a text, as `Tokenizer.read` says unless its opener isn't wanted."""
        if add_special_tokens is False:
            return self.text.encode([string])[0].tolist()
        return self.text.read(string, "a text of the task")

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p, and whether greedy decoding would produce it.

        Contexts that are too long are truncated on the left.
        """
        return self.sum_scores(
            [self.sequels(context, continuation) for _, context, continuation in requests]
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log p of each whole text."""
        texts = [self.tok_encode(request.args[0], False) for request in requests]
        return [total for total, _ in self.sum_scores([self.sequels([], text) for text in texts])]

    def sequels(self, context: list[int], continuation: list[int]) -> list[Sequel]:
        """The continuation's tokens, in windows of at most the model's length."""
        context = context or [self.prefix_token_id]
        if len(continuation) <= self.max_length:
            tokens = (context + continuation)[-self.max_length - 1 :]
            return [Sequel(tokens, len(continuation))] if continuation else []
        windows = get_rolling_token_windows(continuation, context[-1], self.max_length, 1)
        return [Sequel(a + b, len(b)) for a, b in map(make_disjoint_window, windows)]

    def sum_scores(self, requests: list[list[Sequel]]) -> list[tuple[float, bool]]:
        """For each request: the sum of log p over its windows, and whether all are greedy."""
        scores = iter(self.score([sequel for windows in requests for sequel in windows]))
        results = []
        for windows in requests:
            window_scores = [next(scores) for _ in windows]
            results.append(
                (fsum(s.loglikelihood for s in window_scores), all(s.greedy for s in window_scores))
            )
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The continuation of each context, up to a stop or the number of tokens asked for.

        A context that leaves no room for them is truncated on the left, but never below half of
        the model's length; the generated text then ends at the model's length.
        """
        rows, groups = [], defaultdict(list)
        occurrences: Counter = Counter()
        for number, request in enumerate(requests):
            text, settings = request.args
            row, sampling = self.parse_request(text, normalize_gen_kwargs(settings))
            # A row's draws depend on its text alone, not on the other requests or on its batch;
            # repetitions of a text are numbered, so that their draws differ.
            key = jax.random.fold_in(jax.random.key(_SEED), zlib.crc32(text.encode()))
            rows.append((row, jax.random.fold_in(key, occurrences[text])))
            occurrences[text] += 1
            # `extend` is compiled once for each padded length and each way to sample.
            groups[-(-len(row.prompt) // BUCKET), sampling].append(number)
        done = 0
        with Progress("generated", len(rows), "texts") as progress, self.placed.context():
            for (_, sampling), numbers in groups.items():
                count = self.placed.eval_batch_size(min(self.batch_size, len(numbers)))
                for first in range(0, len(numbers), count):
                    chosen = numbers[first : first + count]
                    self.continue_rows([rows[number] for number in chosen], count, sampling)
                    done += len(chosen)
                    progress.update(done)
        return [row.completion() for row, _ in rows]

    def parse_request(self, context: str, settings: dict) -> tuple[Continuation, Sampling]:
        """A context's tokens with its stops and limit, and how to sample."""
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        room = min(settings["max_gen_toks"], self.max_length // 2)
        prompt = tokens[-(self.max_length - room) :]
        limit = min(settings["max_gen_toks"], self.max_length - len(prompt))
        stops = [stop for stop in settings["until"] if stop]
        sampling = Sampling(
            float(settings.get("temperature", 0)),
            settings.get("top_k") or None,
            float(settings.get("top_p") or 1),
        )
        return Continuation(self.text, prompt, stops, limit), sampling

    def continue_rows(
        self, rows: list[tuple[Continuation, jax.Array]], count: int, sampling: Sampling
    ) -> None:
        """Adds tokens to the rows, padded to `count` rows, until all have ended."""
        missing = count - len(rows)
        prompts = [row.prompt for row, _ in rows] + [[self.prefix_token_id]] * missing
        keys = jnp.stack([key for _, key in rows] + [rows[0][1]] * missing)
        # `parse_request` has set all limits.
        most = max(row.limit for row, _ in rows if row.limit is not None)
        generated = generate(self.placed.model, self.params, prompts, most, sampling, keys)
        for _ in grow([row for row, _ in rows], generated):
            pass
