"""Every flag of every verb changes what it says that it changes, and nothing else.

The functions that do a verb's work are replaced by ones that note their arguments. The verb runs
without a flag and with it, and a row says what differs: `FUNCTION.ARGUMENT: value`.
"""

import ast
import importlib
import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import jax
import pytest
from helpers import ROOT, call, parse

from t5x_diffeq import inference
from t5x_diffeq.cli import VERBS
from t5x_diffeq.config import plugins
from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.inference.sampling import Continuation, Sampling
from t5x_diffeq.model.adaptive import Adaptive
from t5x_diffeq.model.flops import forward_flops
from t5x_diffeq.system import console
from t5x_diffeq.system.console import format_count
from t5x_diffeq.training.load import load_run

KEPT = str | int | float | list | tuple | Sampling | Adaptive | None
LOADED = {}  # the run that replaces what verbs load, once the fixture has loaded it


class AllDone(dict):
    """The outcomes of any runs."""

    def __contains__(self, name):
        return True

    def __missing__(self, name):
        return {}


def result(value=None):
    return lambda *_, **__: value


def same(first, *_, **__):
    return first


def load_tasks(asked, shots, include_path, limit):
    """Of the harness, whose import takes seconds."""


def evaluate_run_on_tasks(run, tokenizer, batch_size, tasks, folder):
    """Of the harness."""


SECTION = SimpleNamespace(numbers={})
CHAT = SimpleNamespace(ask=result([1, 2]), end_of_answer=result("END"))
SUMMARY = SimpleNamespace(notes=[], model_class="", parameters=1, logits="")
ANSWERS = {  # of functions that are replaced, by their names; the others return None
    **{"train_to_end": result(0), "finetune": result(0), "Continuation": Continuation},
    "branch_off": lambda *_: Config.of(LOADED["config"]),
    "load_run": lambda *_, **__: LOADED["run"],
    "at_depth": same,
    "evaluate_split": result({"loss": 1.0, "perplexity": 2.0, "tokens": 3}),
    **{"load_tasks": result(SimpleNamespace(methods=())), "evaluate_run_on_tasks": result({})},
    **{"generate": result(()), "_chat_of": result(CHAT), "token_urlsafe": result("token")},
    "_bind": result(SimpleNamespace(getsockname=result(("", 1)))),
    "Server": result(SimpleNamespace(run=result())),
    **dict.fromkeys(("spectra_section", "lyapunov_section", "clustering_section"), result(SECTION)),
    **{"_write_page": result("page"), "save_pretrained": result(SUMMARY)},
    **dict.fromkeys(("read_config_json", "pretrained_params", "to_ode"), result({})),
    **{"with_model": lambda config, *_: (config, None), "check_vocabulary": result(0)},
    "with_tokenizer": lambda config, *_: (config, LOADED["corpus"].tokenizer),
    "load_corpus": lambda *_: LOADED["corpus"],
    **{"read_results": result(AllDone(any={})), "_remaining": same},
}
OF_RUN = "training.load.load_run training.load.Run.at_depth inference.validation.evaluate_split "

# A command of each verb, with the functions that are replaced. Below it a row for each flag: the
# words that are added (the last one with the flag; it replaces one of the same name), and what that
# changes; or the file, perhaps with the test, that asserts what the flag does. DIR is a folder; RUN
# and DIR/run are the same workdir.
TABLE = f"""
train --config=configs/tiny.py:ode --workdir=DIR | \
    cli.train.train_to_end training.loop.check training.branch.branch_off
  --config.seed=3 | train_to_end.config.seed=3
  --workdir=DIR/b | train_to_end.workdir=DIR/b
  --dry_run | check=called; train_to_end=not called
  --branch_from=RUN --branch_from=DIR/run | branch_off.source=DIR/run
  --branch_from=RUN --branch_step=4 | branch_off.step=4
finetune --config=configs/finetune.py:lora --workdir=DIR | cli.finetune.finetune
  --config.seed=3 | finetune.given.seed=3
  --workdir=DIR/b | finetune.workdir=DIR/b
evaluate --workdir=RUN | {OF_RUN}inference.notebook.write_figure \
    inference.harness.load_tasks inference.harness.evaluate_run_on_tasks
  --workdir=DIR/run | load_run.workdir=DIR/run
  --num_steps=3 | load_run.grids=[(3, None)]; at_depth.num_steps=3
  --scheme=heun | load_run.grids=[(None, "heun")]; at_depth.scheme=heun
  --num_steps=2 --plot=DIR/a.png | write_figure=called; write_figure.path=DIR/a.png
  --scheme=tsit5 --rtol=0.1 | evaluate_split.adaptive=Adaptive("tsit5", 0.1)
  --batch_size=5 | evaluate_split.batch_size=5
  --eval_batches=3 | evaluate_split.limit=3
  --checkpoint=4 | load_run.checkpoint=4
  --averages | load_run.averages=True
  --tasks=a --tasks=b,c | load_tasks.asked=["b", "c"]
  --tasks=a --num_fewshot=2 | load_tasks.shots=2
  --tasks=a --include_path=x | load_tasks.include_path=x
  --tasks=a --limit=7 | load_tasks.limit=7
  --tasks=a --output=DIR/o | evaluate_run_on_tasks.folder=DIR/o
generate --workdir=RUN --prompt=ab | {OF_RUN}inference.sampling.generate \
    inference.sampling.Continuation cli.generate._chat_of
  --workdir=DIR/run | load_run.workdir=DIR/run
  --prompt=cd | generate.prompts=[[99, 100]]; Continuation.prompt=[99, 100]
  --chat | _chat_of=called; generate.prompts=[[1, 2]]; Continuation.prompt=[1, 2]; \
    Continuation.stops=["END"]
  --max_tokens=3 | generate.max_tokens=3
  --stop=. | Continuation.stops=["."]
  --temperature=0.5 | generate.sampling=Sampling(0.5)
  --top_k=5 | generate.sampling=Sampling(0.8, 5)
  --top_p=0.5 | generate.sampling=Sampling(0.8, None, 0.5)
  --num_steps=3 | load_run.grids=[(3, None)]; at_depth.num_steps=3
  --seed=7 | generate.key=[0, 7]
  --checkpoint=best | load_run.checkpoint=best
  --averages | load_run.averages=True
explore --workdir=RUN | cli.explore._bind inference.trained_run.load secrets.token_urlsafe \
    uvicorn.Server inference.explorer.answers.Explorer inference.explorer.app.make_app
  --workdir=DIR/run | load.workdir=DIR/run; Explorer.name=run; make_app.explorers.run=None
  --host=::1 | _bind.host=::1
  --port=9 | _bind.port=9
  --checkpoint=4 | load.checkpoint=4
  --averages | load.averages=True
status --workdir=RUN |
  --workdir | status_test.test_the_verb_on_a_run_and_on_a_folder_of_runs
  --json | status_test.test_the_verb_on_a_run_and_on_a_folder_of_runs
  --plot | status_test.test_the_losses_of_several_runs_in_one_figure
prepare_data --config=configs/tiny.py:ode --output=DIR | cli.prepare_data.prepare_data
  --config.data.tokenizer=bytes | prepare_data.data.tokenizer=bytes
  --output=DIR/b | prepare_data.folder=DIR/b
  --shards=5 | prepare_data.shards=5
  --shard=3/8 | prepare_data.part=(3, 8)
  --workers=2 | prepare_data.workers=2
benchmark --config=configs/tiny.py:ode | cli.benchmark.show_comparison
  --config.seed=3 | show_comparison.config.seed=3
  --against=configs/tiny.py:baseline,train.batch_size=4 | show_comparison.others=[4]
  --rounds=7 | show_comparison.rounds=7
plan --config=configs/tiny.py:ode --topology=cpu:8 | \
    planner.topology.make_topology cli.plan.sweep cli.plan.show_plans
  --config.seed=3 | show_plans.config.seed=3
  --topology=cpu:4 | make_topology.name=cpu:4
  --slices=2 | make_topology.slices=2
  --sweep | sweep=called; show_plans=not called
analyze --what=clustering --output=DIR | analysis.clustering_section.clustering_section \
    analysis.report.write_section analysis.report.write_report cli.analyze.make_folder
  --seeds=3 | clustering_section.seeds=3
analyze --what=all --workdir=RUN --prompt=ab | {OF_RUN}analysis.spectra_section.spectra_section \
    analysis.lyapunov_section.lyapunov_section analysis.clustering_section.clustering_section \
    analysis.report.write_section analysis.report.write_report \
    cli.analyze._write_page cli.analyze.make_folder
  --what=lyapunov | spectra_section,clustering_section,evaluate_split=not called; \
    load_run.methods=(); write_report.page=lyapunov.html; \
    write_report.title=Lyapunov of RUN; write_report.missing=[]
  --workdir=DIR/run | load_run.workdir=DIR/run; write_report.title=Analysis of run; \
    write_section,write_report.facts.run=DIR/run; \
        make_folder,write_section,write_report.folder=DIR/run/analysis
  --output=DIR/o | make_folder,write_section,write_report.folder=DIR/o
  --prompt=cd | lyapunov_section.prompts=[[99, 100]]; lyapunov_section.pieces=[["c", "d"]]
  --convention=full | lyapunov_section.convention=full
  --times=9 | spectra_section.times=9
  --num_steps=3 | load_run.grids=[(3, None)]; at_depth.num_steps=3
  --interactive | _write_page=called
  --checkpoint=4 | load_run.checkpoint=4
export --workdir=RUN --output=DIR/out | {OF_RUN}hf.save_pretrained.save_pretrained
  --workdir=DIR/run | load_run.workdir=DIR/run
  --output=DIR/o | save_pretrained.output=DIR/o
  --num_steps=3 | load_run.grids=[(3, None)]; at_depth.num_steps=3
  --peft | save_pretrained.peft=True
  --form=hypernetwork | save_pretrained.kept_form=hypernetwork
  --checkpoint=4 | load_run.checkpoint=4
  --averages | load_run.averages=True
convert --config=configs/default.py --input=DIR --workdir=DIR/new | \
    {OF_RUN}hf.from_pretrained.read_config_json \
    hf.from_pretrained.with_model hf.from_pretrained.with_tokenizer \
    hf.from_pretrained.check_vocabulary hf.from_pretrained.pretrained_params \
    hf.to_ode.to_ode hf.new_run.write_run data.corpus.load_corpus
  --input=DIR/run | read_config_json,with_tokenizer,pretrained_params.folder=DIR/run
  --workdir=DIR/new2 | write_run,load_corpus,load_run.workdir=DIR/new2
  --to_ode | to_ode=called; write_run.config.model.time_basis=table:12; \
    write_run.config.model.time_embed_dim=12
  --sequence_length=8 | with_model.length=8
  --config.seed=3 | with_model,with_tokenizer,write_run.config.seed=3
sweep --config=configs/tiny.py:ode --output=DIR --grid=model.scan_unroll=1,2 | \
    experiments.runs.carry_out experiments.runs.read_results cli.sweep._present
  --config.seed=3 | carry_out.runs=["scan_unroll=1-seed=3", "scan_unroll=2-seed=3"]
  --output=DIR/o | carry_out,read_results,_present.output=DIR/o
  --grid=model.scan_unroll=3 | carry_out.runs=["scan_unroll=3-seed=0"]
  --seeds | grid_test.test_dry_run_lists_the_commands_of_a_part
  --part=1/2 | carry_out.runs=["scan_unroll=2-seed=0"]; carry_out.results=results-1.jsonl
  --dry_run | grid_test.test_dry_run_lists_the_commands_of_a_part
  --table_only | carry_out=not called
reproduce --experiment=appendixE --output=DIR --text=stdlib | \
    experiments.runs.carry_out experiments.runs.read_results cli.reproduce._remaining
  --experiment | paper_settings_test
  --output=DIR/o | carry_out,read_results.output=DIR/o
  --scale | paper_settings_test
  --text | paper_settings_test
  --tokenizers | paper_settings_test
  --seeds=1 | carry_out,_remaining.runs=RUNS_OF_SEED_0
  --part=1/2 | carry_out.runs=RUNS_OF_BASELINE; carry_out.results=results-1.jsonl
  --dry_run | carry_out,_remaining=not called
"""
NAMES = {
    **{"Sampling": Sampling, "Adaptive": Adaptive, "__builtins__": {}},
    "RUNS_OF_SEED_0": [
        f"laptop-stdlib-{model}-seed=0{verb}"
        for model in ("ode", "baseline")
        for verb in ("", "-spectra")
    ],
    "RUNS_OF_BASELINE": [
        f"laptop-stdlib-baseline-seed={n}{verb}" for n in range(3) for verb in ("", "-spectra")
    ],
}


class Row(NamedTuple):
    verb: str
    command: list[str]  # words before those of the row
    replaced: list[str]
    words: list[str]
    changes: str

    @property
    def flag(self):
        return flag_of(self.words[-1]).partition(".")[0]

    def __str__(self):
        return f"{self.verb} {self.words[-1]}"

    @property
    def expected(self):
        """By name, what the flag changes."""
        changes = {}
        for change in self.changes.split("; "):
            names, _, value = change.strip().partition("=")
            *functions, last = names.split(",")
            argument = last.partition(".")[1:]
            for name in (*(function + "".join(argument) for function in functions), last):
                changes[name] = self._value(value)
        return changes

    @staticmethod
    def _value(text):
        try:
            return eval(text, dict(NAMES))
        except (NameError, SyntaxError):
            return text


def rows_of_table():
    verb = ()
    for line in TABLE.strip().splitlines():
        words, _, rest = line.partition(" | ")
        if line.startswith("  "):
            yield Row(*verb, words.split(), rest)
        else:
            name, *command = words.split()
            verb = name, command, rest.split()


def flag_of(word):
    return word.removeprefix("--").partition("=")[0]


ROWS = [*rows_of_table()]
CALLS = {}  # of the commands without a flag


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
    LOADED["config"], workdir = finished
    LOADED["corpus"] = load_corpus(workdir)
    LOADED["run"] = load_run(workdir, LOADED["corpus"].tokenizer.vocab_size, batch_size=1)
    folder = tmp_path_factory.mktemp("flags")
    (folder / "run").symlink_to(workdir)
    return folder


def module_of(verb):
    return importlib.import_module(f"t5x_diffeq.cli.{verb}")


def values_in(name, value):
    """What can be compared of a value, by name."""
    if isinstance(value, Config):
        value = value.flat()
    if isinstance(value, DataKeys):
        value = asdict(value)
    if isinstance(value, dict) and any(isinstance(x, Config) for x in value.values()):
        value = [config.train.batch_size for config in value.values()]
    if isinstance(value, dict):
        return {f"{name}.{key}": x for key, x in value.items() if isinstance(x, KEPT)}
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value).tolist()
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, list) and value and hasattr(value[0], "labels"):
        value = [run.name for run in value]
    if isinstance(value, list) and SECTION in value:
        value = len(value)
    return {name: value} if isinstance(value, KEPT) else {}


def calls_of(verb, *words, folder, finished, replaced):
    """The arguments of the first call of each function that a command calls."""
    places = {"DIR": str(folder), "RUN": str(finished[1])}
    seen = {}

    def noting(name, original, answer):
        signature = inspect.signature(original)

        def noted(*positional, **named):
            bound = signature.bind(*positional, **named)
            bound.apply_defaults()
            if name not in seen:
                seen[name] = {}
                for argument, value in bound.arguments.items():
                    seen[name] |= values_in(f"{name}.{argument}", value)
            return answer(*positional, **named)

        return noted

    for place, path in places.items():
        words = [word.replace(place, path) for word in words]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [verb, *words])  # where config_flags finds overrides
        stub = ModuleType("harness")
        stub.load_tasks, stub.evaluate_run_on_tasks = load_tasks, evaluate_run_on_tasks
        patch.setitem(sys.modules, "t5x_diffeq.inference.harness", stub)
        patch.setattr(inference, "harness", stub, raising=False)
        owners = [owner_of(path) for path in replaced]  # all are imported before one is replaced
        for owner, path in zip(owners, replaced, strict=True):
            name = path.rpartition(".")[2]
            answer = ANSWERS.get(name, result())
            patch.setattr(owner, name, noting(name, getattr(owner, name), answer))
        call(module_of(verb), *words)
    for arguments in seen.values():
        for argument, value in arguments.items():
            if isinstance(value, str):
                for place, path in places.items():
                    value = value.replace(path, place).replace(Path(path).name, place)
                arguments[argument] = value
    return seen


def owner_of(path):
    """The module, or the class of it, that has the function of this path."""
    module, _, owner = path.rpartition(".")[0].rpartition(".")
    if owner[0].isupper():
        return getattr(importlib.import_module(f"t5x_diffeq.{module}"), owner)
    return importlib.import_module(f"t5x_diffeq.{module}.{owner}" if module else owner)


def source_of_test(file, name):
    """The text of a test file, or of its function of this name."""
    (path,) = (ROOT / "tests").rglob(f"{file}.py")
    text = path.read_text()
    functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)]
    return (
        next(ast.get_source_segment(text, x) for x in functions if x.name == name) if name else text
    )


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_flag_changes_what_it_says(row, folder, finished):
    if "=" not in row.changes:
        assert f"--{row.flag}" in source_of_test(*row.changes.partition(".")[::2])
        return

    def words(more):
        taken = {flag_of(word) for word in more}
        return [*(word for word in row.command if flag_of(word) not in taken), *more]

    *others, last = row.words
    given = {"folder": folder, "finished": finished, "replaced": row.replaced}
    first = (row.verb, *words(others))
    if first not in CALLS:
        CALLS[first] = calls_of(*first, **given)
    others = [word for word in others if flag_of(word) != flag_of(last)]
    before = CALLS[first]
    then = calls_of(row.verb, *words([*others, last]), **given)
    changed, expected = {}, row.expected
    for name in before | then:
        if name not in then:
            changed[name] = "not called"
        elif name not in before:
            changed[name] = "called"
            changed |= {key: x for key, x in then[name].items() if key in expected}
        else:
            changed |= {k: x for k, x in then[name].items() if before[name].get(k, ...) != x}
    assert changed == expected


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_has_a_row(verb):
    flags = {name for name in module_of(verb).FLAGS if "." not in name}
    assert flags - {"quiet", "trust_plugins"} == {row.flag for row in ROWS if row.verb == verb}


def test_every_figure_of_evaluate(folder, finished, monkeypatch, capsys):
    """As JSON, and in the table that compares grids."""
    values = {"loss": 1.5, "perplexity": 4.25, "bits_per_byte": 2.125, "tokens": 99}
    monkeypatch.setitem(ANSWERS, "evaluate_split", result(values))
    replaced = ["training.load.load_run", "inference.validation.evaluate_split"]
    words = ("evaluate", "--workdir=RUN", "--num_steps=2,4")
    calls_of(*words, folder=folder, finished=finished, replaced=replaced)
    out, err = capsys.readouterr()
    model = LOADED["run"].placed.model.config
    flops = [forward_flops(model.at_depth(n)) for n in (2, 4)]
    assert list(map(json.loads, out.splitlines())) == [
        {
            **{"step": 6, "num_steps": n, "scheme": "euler", "flops_per_token": cost},
            **{f"eval/{name}": value for name, value in values.items()},
        }
        for n, cost in zip((2, 4), flops, strict=True)
    ]
    first, second = (f"{format_count(cost)}" for cost in flops)
    assert [line.split() for line in err.splitlines()[:5]] == [
        ["2", "steps", "of", "euler:", "perplexity", "4.25"],
        ["4", "steps", "of", "euler:", "perplexity", "4.25"],
        ["scheme", "steps", "FLOPs/token", "loss", "bits/byte", "perplexity"],
        ["euler", "2", first, "1.5000", "2.1250", "4.25", "trained", "grid"],
        ["euler", "4", second, "1.5000", "2.1250", "4.25"],
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_flags_of_every_verb(verb, monkeypatch):
    monkeypatch.setattr(console, "quiet", False)
    monkeypatch.setattr(plugins, "trust_all", False)
    flags = module_of(verb).FLAGS
    words = [verb, *(["--config=configs/tiny.py"] if "config" in flags else [])]
    for more, expected in (
        ([], (False, False)),
        (["--quiet"], (True, False)),
        (["--trust_plugins"], (False, True)),
    ):
        parse(module_of(verb), [*words, *more])
        assert (console.quiet, plugins.trust_all) == expected
