"""The harness's three kinds of requests, against log-softmax one by one."""

import os
from functools import cache

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LENGTH_OF_LINES as LENGTH
from helpers import LINES as TEXT
from row import BORDER, Row

from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.training.evaluation import evaluate_loss, make_eval_step
from t5x_diffeq.training.load import load_run
from t5x_diffeq.training.setup import make_setup

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e '.[eval]'")

from lm_eval.api.instance import Instance

from t5x_diffeq.inference.harness_model import DiffEqLM

PAIRS = [  # contexts and continuations: with the byte tokenizer a character is a token
    ("", "line"),
    ("", "\0line"),  # begins with the token that stands for an empty context
    ("l", "i"),
    ("line 1 of ", "the text"),
    ("  ", "x"),
    (TEXT[: LENGTH - 7], TEXT[LENGTH - 7 : LENGTH + 1]),  # as many inputs as the model takes
    (TEXT[: LENGTH - 7], TEXT[LENGTH - 7 : LENGTH + 2]),
    (TEXT[:400], TEXT[400:420]),
    ("", TEXT[:LENGTH]),
    ("line", TEXT[: 2 * LENGTH + 11]),  # a continuation that takes several windows
    ("nothing", ""),
]
TEXTS = ["", "a", TEXT[:50], TEXT[: LENGTH - 1], TEXT[:LENGTH], TEXT[: LENGTH + 1], TEXT[:500]]


def small_random_params(placed):
    """Initial parameters, and a little more of each."""
    config = placed.config.with_values({"mesh.data": 1, "mesh.fsdp": 1})
    setup = make_setup(config, 256, jax.devices()[:1])
    with setup.context():
        params = setup.init_state().params
        moved = jax.tree.map(lambda x: x + 0.02 * jnp.sign(jnp.sin(99 * x)), params)
    return jax.device_get(moved)


@pytest.fixture(scope="module")
def model_of(run_on_lines):
    """The harness's model with random weights, by devices and batch size."""

    @cache
    def load(devices):
        run = load_run(run_on_lines, 256, batch_size=devices)
        assert run.placed.mesh.size == devices
        shardings = jax.tree.map(lambda x: x.sharding, run.placed.abstract_params)
        return run.placed, jax.device_put(small_random_params(run.placed), shardings)

    def of(devices=1, batch_size=4):
        return DiffEqLM(*load(devices), ByteTokenizer(), batch_size, {})

    return of


@pytest.fixture(scope="module")
def log_softmax(model_of):
    """Of the whole vocabulary after each of a few tokens, one sequence at a time, in float64."""
    lm = model_of()
    apply = jax.jit(lambda tokens: lm.placed.model.apply({"params": lm.params}, tokens))

    def of(tokens):
        assert 0 < len(tokens) <= LENGTH
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(apply(padded), np.float64)[0, : len(tokens), :256]
        highest = logits.max(-1, keepdims=True)
        return logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))

    return of


def requests(kind, arguments):
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


def score_windows(log_softmax, row):
    """log p and the likeliest of each token of a row but the first, in the harness's windows."""
    values, best, n = [], [], len(row) - 1
    for start in range(0, n, LENGTH):
        end = min(start + LENGTH, n)
        first = max(end - LENGTH, 0)
        table = log_softmax(row[first:end])[start - first :]
        values += table[np.arange(end - start), row[start + 1 : end + 1]].tolist()
        best += table.argmax(-1).tolist()
    return np.array(values), np.array(best)


@pytest.mark.slow
def test_loglikelihood(model_of, log_softmax):
    found = model_of().loglikelihood(requests("loglikelihood", PAIRS))
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        tokens = list((context or "\0").encode() + continuation.encode())
        if not context and continuation.startswith("\0"):
            tokens = tokens[1:]
        spaces = len(context) - len(context.rstrip())  # the harness moves these
        count = len(continuation) + spaces if context else len(tokens) - 1
        tokens = tokens if context.strip() or not context else [0, *tokens]
        if count > LENGTH:
            values, best = score_windows(log_softmax, tokens[-count - 1 :])
        else:
            inputs = tokens[-LENGTH - 1 :]
            values, best = score_windows(log_softmax, inputs)
            values, best = values[len(values) - count :], best[len(best) - count :]
        np.testing.assert_allclose(total, values.sum(), atol=1e-4, err_msg=context[:20])
        assert greedy == np.array_equal(best, tokens[len(tokens) - count :])


@pytest.mark.slow
def test_rolling(model_of, log_softmax):
    arguments = [(text,) for text in TEXTS]
    lm = model_of()
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))
    for text, total in zip(TEXTS, found, strict=True):
        values, _ = score_windows(log_softmax, [0, *text.encode()])
        np.testing.assert_allclose(total, values.sum(), atol=1e-4)


GENERATIONS = [
    ("line 1", {"max_gen_toks": 12, "until": ["\n"]}),
    ("", {"max_gen_toks": 5}),
    (TEXT[: LENGTH - 5], {"max_gen_toks": 5}),
    (TEXT[:LENGTH], {"max_gen_toks": 3, "until": []}),
    (TEXT[:500], {"max_gen_toks": 100, "until": "q"}),  # half of the length is kept for the context
]


@pytest.mark.slow
def test_generate_until(model_of, log_softmax):
    """Greedy, as by reading the whole prefix for each token, where the best two can be told."""
    lm = model_of()
    for (context, how), said in zip(
        GENERATIONS, lm.generate_until(requests("generate_until", GENERATIONS)), strict=True
    ):
        most = how["max_gen_toks"]
        row = list(context.encode() or b"\0")[-(LENGTH - min(most, LENGTH // 2)) :]
        most, expected = min(most, LENGTH - len(row)), []
        until = [how["until"]] if isinstance(how.get("until"), str) else how.get("until", [])
        while len(expected) < most:
            last = log_softmax(row + expected)[-1]
            if np.diff(np.sort(last)[-2:]) < 1e-3 or last.argmax() == 0:
                break
            expected.append(int(last.argmax()))
        text = lm.text.decode(expected)
        for stop in until:
            text = text.split(stop)[0]
        text = text.rstrip("\ufffd")  # a character may be cut in two
        assert said.startswith(text) if len(expected) < most else said.rstrip("\ufffd") == text


def answers(lm, order=None):
    """To requests of all kinds, in an order of their own."""
    found = []
    for kind, arguments in (
        ("loglikelihood", PAIRS),
        ("loglikelihood_rolling", [(text,) for text in TEXTS]),
        ("generate_until", GENERATIONS),
    ):
        numbers = (order or range)(len(arguments))
        results = getattr(lm, kind)(requests(kind, [arguments[n] for n in numbers]))
        found += [result for _, result in sorted(zip(numbers, results, strict=True))]
    return found


@pytest.mark.slow
def test_whatever_the_batch_devices_and_order(model_of):
    expected = answers(model_of())
    for devices, batch_size, order in (
        (1, 1, None),
        (1, 3, lambda n: list(range(n))[::-1]),
        (8, 8, lambda n: [*range(1, n, 2), *range(0, n, 2)]),
    ):
        lm = model_of(devices, batch_size)
        for one, other in zip(answers(lm, order), expected, strict=True):
            if isinstance(one, str):
                assert one == other
            else:
                np.testing.assert_allclose(one, other, atol=1e-4)


def test_one_document_of_whole_windows_is_what_evaluate_says(model_of):
    lm = model_of()
    text = TEXT[: 3 * LENGTH]
    (total,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    row = Row(np.array([*text.encode()], np.int32), [len(text)])
    windows = Windows(row, LENGTH, "validation", BORDER, ragged=True)
    with lm.placed.context():
        eval_step = make_eval_step(lm.placed)
        ours = evaluate_loss(
            eval_step, lm.params, eval_batches([windows], 2, lm.placed.batch_sharding)
        )
    assert ours["tokens"] == len(text)
    np.testing.assert_allclose(total, -ours["loss"] * ours["tokens"], rtol=1e-6)


@pytest.mark.slow
def test_a_text_is_read_after_its_opener(model_of, log_softmax):
    """The opener is a context, and is never predicted."""
    lm = model_of()
    lm.text.opener = 7
    tokens = [*b"a few words"]
    after = log_softmax([7, *tokens[:-1]])
    expected = [after[n, token] for n, token in enumerate(tokens)]
    (total,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [("a few words",)]))
    np.testing.assert_allclose(total, sum(expected), rtol=1e-5)
    pair = [("a few", " words"), ("", "a few words")]
    (part, _), (whole, _) = lm.loglikelihood(requests("loglikelihood", pair))
    np.testing.assert_allclose(part, sum(expected[5:]), rtol=1e-5)
    np.testing.assert_allclose(whole, sum(expected), rtol=1e-5)
    row, _ = lm.parse_request("a few", {"max_gen_toks": 3, "until": []})
    assert row.prompt == [7, *b"a few"] and row.text() == "a few"
