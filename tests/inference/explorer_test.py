"""The server of `explore`: what its endpoints answer, and what they refuse."""

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from small_models import random_params
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

import t5x_diffeq as td
from t5x_diffeq.inference.explorer import stepping
from t5x_diffeq.inference.explorer.answers import Explorer
from t5x_diffeq.inference.explorer.app import MOST_BYTES, Turns, make_app
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.training.load import Run
from t5x_diffeq.training.placed_model import place_model

TOKEN = "a-token"
TEXT = "line 7 of the text, "
DRAWN = {"max_tokens": 12, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def run(run_on_lines):
    return td.load(run_on_lines)


@pytest.fixture(scope="module")
def client(run):
    app = make_app({"lines": Explorer("lines", run)}, TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(app, headers=headers) as client:
        yield client


def ask(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_data_are_for_those_who_have_the_token(client):
    for shown in ("", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x"):
        assert client.get("/api/runs", headers={"authorization": shown}).status_code == 401
        for path in ("tokens", "read", "continue", "validation", "sensitivity", "paths"):
            answer = client.post(f"/api/{path}", json={}, headers={"authorization": shown})
            assert answer.status_code == 401
    assert client.get("/api/runs").status_code == 200
    page = client.get("/", headers={"authorization": ""})
    assert (
        page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    )
    for file in ("page.css", "charts.js", "tokens.js", "views.js", "page.js"):
        assert file in page.text and client.get(f"/{file}").status_code == 200


def test_the_run_tells_its_grids(client):
    (about,) = client.get("/api/runs").json()["runs"]
    assert (about["trained"], about["scheme"], about["smooth"]) == ([2], "euler", False)
    assert about["offered"][:3] == [1, 2, 3] and "rk4" in about["schemes"]


SLOW = pytest.mark.slow  # another grid is compiled


@pytest.mark.parametrize(
    ("num_steps", "scheme"),
    [(2, "euler"), pytest.param(5, "euler", marks=SLOW), pytest.param(3, "heun", marks=SLOW)],
)
def test_a_reading_is_that_of_the_run(client, run, num_steps, scheme):
    answer = ask(client, "/api/read", text=TEXT, num_steps=num_steps, scheme=scheme)
    there = run.at_depth(num_steps, scheme)
    assert answer["mean_loss"] == pytest.approx(there.loss(TEXT), rel=1e-4)
    assert "".join(answer["tokens"]) == TEXT and answer["loss"][0] is None
    assert [each[-1] for each in answer["loss_at"][1:]] == answer["loss"][1:]
    logits = np.asarray(there.logits(TEXT))
    assert [each[-1][0] for each in answer["top"]] == logits.argmax(-1).tolist()
    states = np.asarray(there.trajectory(TEXT))
    speed = np.sqrt(np.square(np.diff(states, axis=0)).mean(-1)) * num_steps
    np.testing.assert_allclose(answer["speed"], speed.T, rtol=1e-3)
    assert answer["times"] == pytest.approx(np.arange(num_steps + 1) / num_steps, abs=1e-4)
    assert answer["trained"] is (num_steps == 2)
    assert ("says little about the model" in answer["note"]) is (num_steps != 2)


@pytest.mark.parametrize("scheme", ["euler", pytest.param("heun", marks=SLOW)])
def test_adapters_are_those_of_each_node(run, scheme):
    """In readings and the loss on validation text; and the weights have them in the kernels."""
    adapted = {"model.weights": "per_layer", "model.adapter_rank": 2, "model.scheme": scheme}
    config = run.config.with_values({**adapted, "model.num_steps": 3})
    placed = place_model(config, run.tokenizer.vocab_size, run.run.placed.mesh)
    lora = replace(run, run=Run(placed, random_params(placed.model), 0), config=config)
    explorer, W = Explorer("lora", lora), lora.weights(lora.nodes)
    answer = explorer.read(TEXT, (3, scheme))
    assert answer["mean_loss"] == pytest.approx(lora.loss(TEXT), rel=1e-4)
    speed = np.sqrt(np.square(np.diff(lora.trajectory(TEXT), axis=0)).mean(-1)) * 3
    np.testing.assert_allclose(answer["speed"], speed.T, rtol=1e-3)
    loss = lora.evaluate(batch_size=8, eval_batches=1)["loss"]
    assert explorer.validation((3, scheme))["loss"] == pytest.approx(loss, rel=1e-4)
    base = lora.run.params["source"]["weights"]["mlp"]["up"]["kernel"]
    assert ADAPTERS not in W and (np.abs(W["mlp"]["up"]["kernel"] - base).max((1, 2)) > 0.1).all()


def test_a_reading_on_another_grid_compiles_nothing(run):
    """Neither another number of steps nor another scheme does."""
    explorer = Explorer("lines", run)

    def read(*grid):
        explorer.read(TEXT, grid)
        explorer.validation(grid)
        return [each._cache_size() for each in (stepping._sub_field, stepping._weights_at)]

    assert read(2, "euler") == read(3, "heun") == read(5, "strang")


def test_the_tokens_are_known_while_a_text_is_read(client, monkeypatch):
    """And they are those of the reading."""
    begun, done = threading.Event(), threading.Event()
    read, asked = Explorer.read, {"text": "line 321", "num_steps": 3}

    def wait(*arguments):
        begun.set()
        assert done.wait(60)
        return read(*arguments)

    monkeypatch.setattr(Explorer, "read", wait)
    readings = []
    slow = threading.Thread(target=lambda: readings.append(ask(client, "/api/read", **asked)))
    slow.start()
    assert begun.wait(60)
    known = ask(client, "/api/tokens", **asked)
    done.set()
    slow.join()
    assert "".join(known["tokens"]) == "line 321" and known["trained"] is False
    assert known.items() <= readings[0].items()


def test_characters_of_several_bytes(client):
    text = "é€x"
    answer = ask(client, "/api/read", text=text)
    assert "".join(answer["tokens"]) == text and len(answer["ids"]) == 6
    assert answer["tokens"][:2] == ["", "é"]


def test_the_loss_on_validation_text(client, run):
    for num_steps in (2, 3):
        there = run.at_depth(num_steps).evaluate(batch_size=8, eval_batches=1)
        answer = ask(client, "/api/validation", num_steps=num_steps)
        assert answer["loss"] == pytest.approx(there["loss"], rel=1e-4)
        assert answer["tokens"] == there["tokens"]


@pytest.mark.slow
def test_sensitivity_ends_at_the_chosen_token(client):
    answer = ask(client, "/api/sensitivity", text=TEXT, output=3)
    exponents = answer["exponents"]
    assert all(np.isfinite(exponents[:4])) and set(exponents[4:]) == {None}
    assert max(exponents[:4]) == exponents[3]  # of the token in itself


def test_paths_of_the_weights(client, run):
    answer = ask(client, "/api/paths")
    assert np.sum(answer["is_node"]) == 2 and not answer["smooth"]
    for kernel in answer["kernels"].values():
        assert np.shape(kernel["points"]) == (len(answer["times"]), 2)
    up = np.asarray(run.weights(t=answer["times"])["mlp"]["up"]["kernel"])
    sizes = np.sqrt(np.square(up).sum((1, 2)))
    np.testing.assert_allclose(answer["kernels"]["mlp/up"]["sizes"], sizes, rtol=1e-3)


@pytest.mark.parametrize(
    ("num_steps", "scheme"), [(2, "euler"), pytest.param(3, "heun", marks=SLOW)]
)
def test_a_continuation_is_what_generate_draws(client, run, num_steps, scheme):
    there = run.at_depth(num_steps, scheme)
    text = there.generate(TEXT, max_tokens=12, temperature=0.7, seed=5)
    body = {"text": TEXT, "num_steps": num_steps, "scheme": scheme, **DRAWN}
    with client.stream("POST", "/api/continue", json=body) as answer:
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        pieces = [*answer.iter_raw()]
    assert len(pieces) > 1
    assert TEXT + b"".join(pieces).decode() == text
    assert client.post("/api/continue", json={**body, "max_tokens": 0}).text == ""


def test_a_continuation_ends_with_the_document(run, monkeypatch):
    """And a character is told once all its bytes are drawn."""
    explorer = Explorer("lines", run)
    drawn = [*"é€".encode(), explorer.tokenizer.end_of_text, *b"x"]
    monkeypatch.setattr(explorer.stepper, "draw", lambda *_: iter(drawn))

    def pieces(limit):
        return [*explorer.continuation("a", (2, "euler"), limit, Sampling(), 0)]

    assert pieces(10) == ["", "é", "", "", "€", ""]
    assert pieces(3) == ["", "é", "", "\ufffd"]


def test_the_end_of_too_long_a_text_is_read(client):
    text = "".join(f"line {n}\n" for n in range(40))[:-1]
    cut, short = (ask(client, "/api/read", text=each, num_steps=3) for each in (text, text[-120:]))
    assert cut["tokens"] == short["tokens"] and cut["loss"] == short["loss"]
    assert cut["note"].startswith("The text has 309 tokens, and the model takes 160: the last 120")
    body = {"num_steps": 3, "scheme": "euler", **DRAWN}
    ends = [
        client.post("/api/continue", json={"text": t, **body}).text for t in (text, text[-120:])
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("read", [], "the body is []; it must be a JSON object"),
        ("read", {}, "the field 'text' is missing"),
        ("read", {"text": 1}, "text is 1; it must be a text"),
        ("read", {"text": "\ud800"}, "not UTF-8"),
        ("tokens", {"text": ""}, "the text has no tokens"),
        ("read", {"text": "a", "num_steps": 10**9}, "num_steps is 1000000000; it must be at most"),
        ("read", {"text": "a", "scheme": "oiler"}, "scheme is 'oiler'; it can be euler"),
        ("read", {"text": "a", "scheme": "os:abort"}, "scheme is 'os:abort'"),
        ("sensitivity", {"text": "a", "output": 0, "scheme": "os:abort"}, "scheme is 'os:abort'"),
        ("validation", {"scheme": "subprocess:run(args='exit', shell=True)"}, "; it can be euler"),
        ("continue", {"text": "a", **DRAWN, "scheme": "os:abort"}, "scheme is 'os:abort'"),
        ("read", {"text": "a", "run": "x"}, "there is no run 'x'; there are lines"),
        ("read", {"text": "a", "steps": 1}, "there is no field 'steps'; there are run, num_steps"),
        ("sensitivity", {"text": "a", "output": 1}, "output is 1; the text has the tokens 0 to 0"),
        ("continue", {"text": "a", "max_tokens": 1}, "the field 'temperature' is missing"),
        ("continue", {**DRAWN, "text": "a", "temperature": 1e-9}, "0 (greedy), or from 0.001"),
        ("continue", {**DRAWN, "text": "a", "seed": 2**32}, "seed is 4294967296; it must be at"),
    ],
)
def test_bad_requests(client, run_on_lines, path, body, message):
    content = json.dumps(body).encode()
    answer = client.post(f"/api/{path}", content=content)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]
    assert message in said and "\n" not in said
    assert str(run_on_lines) not in answer.text


def test_other_refusals(client, run_on_lines, monkeypatch):
    for content in (b"", b"{", b"\xff", b"[" * 100_000):
        answer = client.post("/api/read", content=content)
        assert answer.status_code == 400 and "the body is not JSON" in answer.text
    answer = client.post("/api/read", content=b" " * (MOST_BYTES + 1))
    assert answer.status_code == 413 and "shorten the text" in answer.text
    for path in ("/api/nothing", "/../app.py", "/%2e%2e/app.py"):
        assert client.get(path).status_code == 404

    def fail(*_):
        raise RuntimeError(f"in {run_on_lines}")

    monkeypatch.setattr(Explorer, "read", fail)
    client = TestClient(client.app, headers=client.headers, raise_server_exceptions=False)
    answer = client.post("/api/read", json={"text": "not read before"})
    assert answer.status_code == 500 and str(run_on_lines) not in answer.text


def test_a_slow_analysis_keeps_nobody_from_reading(client, monkeypatch):
    """While one waits, another text is read, and what is known is told at once."""
    begun, done = threading.Event(), threading.Event()

    def wait(*_):
        begun.set()
        assert done.wait(60)
        return {}

    monkeypatch.setattr(Explorer, "sensitivity", wait)
    body = {"text": TEXT, "output": 1}
    slow = threading.Thread(target=client.post, args=("/api/sensitivity",), kwargs={"json": body})
    slow.start()
    assert begun.wait(60)
    assert ask(client, "/api/read", text="line 123")["ids"]
    assert client.get("/api/runs").status_code == 200
    done.set()
    slow.join()


class Client:
    """Stands in for a request."""

    def __init__(self):
        self.has_gone = False

    async def is_disconnected(self):
        return self.has_gone


def test_what_nobody_waits_for_is_not_computed():
    """Of two requests that wait for a third, that of a client that has gone is given up."""
    release, computed = threading.Event(), []

    async def check():
        worker, gone = Turns("test"), Client()
        first = asyncio.create_task(worker.run(Client(), release.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(worker.run(gone, lambda: computed.append("second")))
        third = asyncio.create_task(worker.run(Client(), lambda: computed.append("third")))
        gone.has_gone = True
        with pytest.raises(ClientDisconnect):
            await second
        with pytest.raises(ClientDisconnect):
            await worker.run(gone, lambda: computed.append("later"))
        release.set()
        await asyncio.gather(first, third)

    asyncio.run(check())
    assert computed == ["third"]


def test_a_crowd_is_sent_away_but_not_who_has_a_part_of_the_answer():
    release = threading.Event()

    async def check():
        worker = Turns("test")
        crowd = [asyncio.create_task(worker.run(Client(), release.wait)) for _ in range(32)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="32 requests are waiting"):
            await worker.run(Client(), int)
        begun = asyncio.create_task(worker.run(Client(), int, begun=True))
        await asyncio.sleep(0)
        release.set()
        assert await begun == 0
        await asyncio.gather(*crowd)

    asyncio.run(check())
