"""The scripts of t5x_diffeq/examples; site_test.py runs them, as notebooks of the site."""

from helpers import ROOT

FOLDER = ROOT / "t5x_diffeq" / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
PRINTED = {  # what the last lines of each say
    "analysis_of_a_run": r"':': largest exponent -?\d",
    "ode_from_pretrained": r"8 steps: \d",
    "own_block": r"ode .*loss(.|\n)*baseline .*loss",
    "own_hook": r"'step': 10, 'parameter_norm/all': \d",
    "own_scheme": r"own_scheme:ralston: errors .* order (1\.[89]|2\.[01])(.|\n)*'loss'",
    "train_and_look_inside": r"Heun: .*perplexity(.|\n)*'def main\(\):",
}


def test_each_script_is_known():
    assert list(PRINTED) == SCRIPTS
    for name in SCRIPTS:
        assert f"python -m t5x_diffeq.examples.{name}\n" in (FOLDER / f"{name}.py").read_text()
