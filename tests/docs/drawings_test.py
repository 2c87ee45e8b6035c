"""The pictures of the pages can be made again from what the pages say."""

import runpy

import pytest
from helpers import ROOT

DOCS = ROOT / "docs"


def test_figures_are_made_of_the_tables():
    pytest.importorskip("matplotlib")
    module = runpy.run_path(DOCS / "figures.py")
    figures = {name: panels for name, panels, *_ in module["figures"]()}
    leads = module["structure_leads"]()
    assert leads["equal FLOPs"]["width 48"][1] == ("W(t)", 0.0549, 0.0055)
    assert leads["equal time"]["width 32"][0] == ("GPT, Euler's scheme", -0.0145, 0.0122)
    assert figures["table1"]["Shakespeare"]["ODE"] == [("ODE", 1.7096, 0.0048)]
    assert figures["figure7"][""]["baseline"][1] == (0.99, 2.0076, 0.0056)
    assert figures["budgets"][""]["ODE, T = 144"] == [(299, 1.7096, 0.0048)]
    assert list(figures["table5"]) == [
        f"Llama, standard library, `{task}`" for task in ("own_ending", "last_word")
    ]
    for name in (*figures, "structures"):
        for kind in ("png", "pdf"):
            assert (DOCS / "images" / f"{name}.{kind}").exists()


def test_the_drawing_of_the_idea_is_up_to_date():
    drawn = runpy.run_path(DOCS / "diagram.py")["draw"]()
    assert (DOCS / "images" / "idea.svg").read_text() == drawn
