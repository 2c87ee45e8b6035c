"""The verb on a trained run: arrays that agree with the library, and a page that needs no other."""

import json
import re
import shutil

import numpy as np
import pytest
from helpers import call
from numpy_model import norm, rotary, softmax
from small_models import LLAMA, TOKENS, random_params, small

from t5x_diffeq.analysis import clustering_section, report
from t5x_diffeq.analysis.clustering import outcomes
from t5x_diffeq.analysis.lyapunov_section import attention_rollout
from t5x_diffeq.cli import analyze
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.tracking.jsonl import read_metrics


@pytest.fixture
def workdir(finished):
    return finished[1]


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_all(workdir, tmp_path, capsys, monkeypatch):
    """Few of everything: two seeds, one choice of the clustering's, nine times."""
    few = lambda **how: outcomes(("peak",), (1.0,), (1.0,), **how)  # noqa: E731
    monkeypatch.setattr(clustering_section.clustering, "outcomes", few)
    copy = shutil.copytree(workdir, tmp_path / "run")
    prompts = ["--prompt=line 1\n", "--prompt=<b>&$x$"]
    call(analyze, "--what=all", f"--workdir={copy}", *prompts, "--seeds=2", "--times=9")
    page = copy / "analysis" / "report.html"
    numbers, path = capsys.readouterr().out.splitlines()
    assert path == str(page)
    assert json.loads(numbers).keys() == {
        f"{product}/{number}"
        for product in ("qk", "ov", "mlp")
        for number in ("first", "last", "ratio", "rank_correlation", "radius_ratio")
    }
    text = page.read_text()
    assert text.count("<h2") == 3 and "not done" not in text
    assert "2 draws" in text and text.count("rank correlation of the largest exponents") == 2
    measured = float(re.search(r"validation split is ([\d.]+) with 2 steps", text)[1])
    assert measured == pytest.approx(list(read_metrics(workdir))[-1]["eval/perplexity"], rel=1e-3)
    assert not re.search(r'(src|href)="(https?:)?//', text) and "<script" not in text
    assert text.count("<figure>") == 8 + 2 + 3 and text.count('<svg class="chart') == 2 * 13
    assert "1 clusters" not in text and "Kaplan" not in text
    assert "<h1>Analysis of run</h1>" in text
    assert re.search(r"validation loss</dt><dd>[\d.]+ nats per token", text)
    assert "&lt;" in text and "<b>" not in text
    for link in set(re.findall(r'href="([\w.]+)"', text)):
        assert (page.parent / link).stat().st_size > 0
    for name in ("spectra", "lyapunov", "clustering"):
        manifest = json.loads((page.parent / f"{name}.json").read_text())
        arrays = np.load(page.parent / manifest["file"])
        assert {k: list(arrays[k].shape) for k in arrays} == {
            k: about["shape"] for k, about in manifest["arrays"].items()
        }
    assert not list(page.parent.glob(".*"))  # nothing half-written


def test_what_is_done_stays(workdir, tmp_path, monkeypatch):
    """A run that ends in its third analysis leaves two, and a page that names the third."""

    def section(name):
        arrays = {"x": (np.arange(2), "[x]")}
        return report.Analysis(name, f"The {name}", ["How."], [], {}, arrays)

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(analyze, "_make_spectra_section", lambda *_: section("spectra"))
    monkeypatch.setattr(analyze, "_make_lyapunov_section", lambda *_: section("lyapunov"))
    monkeypatch.setattr(analyze, "_make_clustering_section", stop)
    with pytest.raises(KeyboardInterrupt):
        call(analyze, "--what=all", f"--workdir={workdir}", f"--output={tmp_path}")
    files = {f"{name}.{kind}" for name in ("spectra", "lyapunov") for kind in ("npz", "json")}
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", *files}
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2") == 2 and page.endswith("</html>")
    assert page.count("not done yet") == 1 and "<li>Clustering: not done yet</li>" in page


def test_a_folder_that_can_not_be_written_is_found_first(monkeypatch):
    monkeypatch.setattr(analyze, "_make_clustering_section", None)
    with pytest.raises(InputError, match=r"--output=/proc/x can't be written: .*; name another"):
        call(analyze, "--what=clustering", "--output=/proc/x")


@pytest.mark.slow
def test_the_page_of_explore_as_a_file(workdir, tmp_path, capsys):
    """It holds the run's own grid as the trained one, whatever --num_steps says; no other page."""
    prompt = "--prompt=ab </script>"
    call(
        analyze,
        "--interactive",
        f"--workdir={workdir}",
        f"--output={tmp_path}",
        "--num_steps=3",
        prompt,
    )
    assert capsys.readouterr().out == f"{tmp_path / 'explore.html'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["explore.html"]
    page = (tmp_path / "explore.html").read_text()
    assert page.count("</script>") == 5 and r"ab \u003c/script>" in page
    assert '"trained": [2]' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "takes spectra, lyapunov, clustering or all, as its first argument"),
        (["--what=clustering"], "analyze needs --workdir=DIR"),
        (["--what=all", "--convention=half"], "--convention=half is unknown; there are pair"),
        (["--what=all", "--times=1"], "--times=1 must be at least 2"),
        (["--what=clustering", "--prompt=x"], "--prompt is for analyze lyapunov; leave it out, or"),
        (["--what=lyapunov", "--times=5"], "--times is for analyze spectra; leave it out, or"),
        (["--what=spectra", "--seeds=3"], "--seeds is for analyze clustering; leave it out, or"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        call(analyze, *arguments)


@pytest.mark.slow
def test_bad_arguments_of_a_run(workdir, tmp_path):
    with pytest.raises(InputError, match="--prompt has 18 tokens; the model takes 1 to 16"):
        call(analyze, "--what=lyapunov", f"--workdir={workdir}", f"--prompt={'ab' * 9}")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is a file; name a folder"):
        call(analyze, "--what=spectra", f"--workdir={workdir}", f"--output={tmp_path / 'file'}")


def test_what_may_come_first():
    name_positional = analyze.FLAGS.name_positional
    assert name_positional(["a", "spectra", "--x"]) == ["a", "--what=spectra", "--x"]
    assert name_positional(["a", "--x", "spectra"]) == ["a", "--x", "spectra"]
    assert name_positional(["a"]) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt", "llama"])
def test_attention_rollout_equals_numpy(changes):
    model = small(num_steps=1, **changes)
    params = random_params(model)
    found = attention_rollout(model, params, TOKENS[:, :5], np.array([4, 2]))
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    assert (found[1, 3:] == 0).all()
    W = model.apply({"params": params}, method="weights")
    y = model.apply({"params": params}, TOKENS[:, :5], W, method="trajectory")[0, 0]
    W = {
        k: {
            n: {m: np.asarray(a[0]) for m, a in v.items()}
            if isinstance(v, dict)
            else np.asarray(v[0])
            for n, v in tree.items()
        }
        for k, tree in W.items()
    }
    gpt = not changes
    x = norm(W["attention_norm"], np.asarray(y), 1e-5, gpt)
    matrices = []
    for h in range(4):
        if gpt:
            q, k = (
                x @ W["attention"]["qkv"]["kernel"][:, c, h] + W["attention"]["qkv"]["bias"][c, h]
                for c in (0, 1)
            )
        else:
            q = rotary(x @ W["attention"]["query"]["kernel"][:, h])
            k = rotary(x @ W["attention"]["key"]["kernel"][:, h // 2])
        scores = q @ k.T / 2
        scores[np.triu_indices(5, 1)] = -np.inf
        matrices.append(softmax(scores))
    expected = (np.mean(matrices, axis=0)[4] + np.eye(5)[4]) / 2
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_products_are_typeset_as_in_the_figures():
    assert report.typeset("a < W_Q W_K^T, W_up, t^4") == (
        "a &lt; <i>W</i><sub>Q</sub> <i>W</i><sub>K</sub><sup>T</sup>, <i>W</i><sub>up</sub>, "
        "<i>t</i><sup>4</sup>"
    )
    assert report.typeset("data.text_files t5x_diffeq") == "data.text_files t5x_diffeq"
    assert report.typeset("|lambda| 10^p") == "|<i>&lambda;</i>| 10<sup>p</sup>"
