"""Mistakes of a new user: each ends with status 2 and one line that names it and the way out."""

import re
import sys
from collections import defaultdict
from importlib import import_module

import pytest
from helpers import ROOT, forget_flags

from t5x_diffeq import __main__
from t5x_diffeq.cli import VERBS, command_line
from t5x_diffeq.config.config import keys_meant

TINY = "--config=configs/tiny.py"
NOT_KEYS = {  # of the table: classes, scripts, and parts of names
    *("Trainer", "nanochat.dataset", "tok_train", "aspect_ratio", "head_dim"),
}


@pytest.fixture
def said(capsys, monkeypatch, tmp_path):
    """What `python -m t5x_diffeq WORDS` says, run in this process."""

    def said(words: str | list[str]) -> str:
        words = words.split() if isinstance(words, str) else words
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(sys, "argv", ["t5x_diffeq", *words])
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it isn't installed
        monkeypatch.setattr(command_line, "exit_process", sys.exit)  # this process goes on
        if (verb := words[0]) in VERBS:
            forget_flags(import_module(f"t5x_diffeq.cli.{verb}"))
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("error: ")
        return line

    return said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trian", "there is no verb 'trian'; did you mean train?"),
        ("train configs/tiny.py --workdir=w", "did you mean --config=configs/tiny.py?"),
        ("train --workdir=w", "train needs --config=FILE"),
        (f"train {TINY}", "train needs --workdir=DIR"),
        ("train --config=configs/tinny.py --workdir=w", "did you mean configs/tiny.py?"),
        ("train --config=configs/default.py:ode --workdir=w", "this file has no variants"),
        ("train --config=my.py --workdir=w", "there are configs/default.py, configs/finetune.py"),
        (f"train {TINY}:smoth --workdir=w", "variant 'smoth' is unknown; there are ode, compact"),
        (f"train {TINY} --wrkdir=w", "--wrkdir is not a flag of this verb; did you mean --work"),
        (f"train {TINY} --model.num_steps=3", "did you mean --config.model.num_steps?"),
        (f"train {TINY} --batch_size=3", "did you mean --config.train.batch_size?"),
        ("train --help=lr", "no such key or section; did you mean optimizer.learning_rate?"),
        (f"train {TINY} --workdir", "--workdir has no value; write --workdir=VALUE"),
        ("train --help=warmup", "no such key or section; did you mean optimizer.warmup_fraction?"),
        ("finetune --help=train.totl_steps", "did you mean train.total_steps?"),
        ("plan --help=wärme", "--help=keys prints all keys"),
        ("status --help=keys", "this verb takes no config; --help alone prints its flags"),
        (f"train {TINY} --config.model.num_step=3", "did you mean model.num_steps?"),
        (f"train {TINY} --config.train.total_steps=1e3", "=1e3 is invalid; it must be a whole nu"),
        (f"train {TINY} --config.train.total_steps=1.5", "=1.5 is invalid; it must be a whole nu"),
        (f"train {TINY} --config.train.total_steps = 5", "write --config.train.total_steps=VALUE"),
        (f"train {TINY} --config.train.early_stopping=3", "`train --help=keys` prints all keys"),
        (f"train {TINY} --config.train.epochs=3", "did you mean train.total_steps?"),
        (f"train {TINY} --config.model.num_layers=3", "did you mean model.num_steps?"),
        (f"train {TINY} --config.model.hidden_size=3", "did you mean model.embed_dim?"),
        (f"train {TINY} --config.optimizer.clip=3", "did you mean optimizer.max_grad_norm?"),
        (f"train {TINY} --config.train.output_dir=w", "did you mean --workdir?"),
        (f"train {TINY} --config.train=3", "'train' is a section of the config, and no key"),
        (f"train {TINY} --lr=3", "did you mean --config.optimizer.learning_rate?"),
        (f"train {TINY} --epochs=3", "did you mean --config.train.total_steps?"),
        (f"train {TINY} --output_dir=w", "did you mean --workdir?"),
        (
            f"train {TINY} --device=cpu",
            "did you mean JAX_PLATFORMS=cpu, cuda or tpu in the environment?",
        ),
        ("generate --workdir=w --max_new_tokens=3", "did you mean --max_tokens?"),
        (f"train {TINY} \u2014workdir=w", "begins with another kind of dash; write --workdir=w"),
        ("train --config=https://a.b/tiny.py", "is an address; download the file, and give its pa"),
        ("generate --workdir=runs/mine/checkpoints/3", "is a part of the run "),
        (f"train {TINY} --early_stopping=3", "see --help, and --help=keys for the keys of a con"),
        (f"train {TINY} --config.train.total-steps=5", "did you mean train.total_steps?"),
        ("train --config.train.total_steps=5 --workdir=w", "none is given before it; give --conf"),
        (f"train --config.seed=5 {TINY}", "--config.seed changes a config, and none is given befo"),
        (
            f"train {TINY} --config.train.batch_size=many",
            "config.train.batch_size=many is invalid; it must be a whole number, such as its defa",
        ),
        (
            f"train {TINY} --config.model.scheme=eulr",
            "model.scheme is 'eulr'; it can be euler, lie_trotter, strang, midpoint, heun, rk4, p",
        ),
        (
            f"train {TINY} --config.mesh.data=16 --workdir=w",
            "mesh data 16 x fsdp 1 x tensor 1 needs 16 devices, and JAX finds 8",
        ),
        (f"train {TINY} --config.mesh.data=16 --workdir=w --dry_run", "and JAX finds 8"),
        (f"train {TINY} --branch_from=r --workdir=w --dry_run", "can't check a branch"),
        (f"train {TINY} --config.data.path=a.txt --workdir=w", "--config.data.source=text_files"),
        (f"prepare_data {TINY} --config.data.path=a.txt --output=o", "source=text_files does"),
        ("evaluate --workdir=w --scheme=tsit", "did you mean tsit5? There are euler, lie_trott"),
        ("evaluate --workdir=w --config.model.num_steps=4", "did you mean --num_steps?"),
        ("evaluate --workdir=w", "w holds no run: there is no such folder; name a run's wor"),
        (f"train {TINY} workdir=w", "did you mean --workdir=w?"),
        (
            "evaluate --workdir=w --num_steps=3,,x",
            "--num_steps=3,,x has an empty entry; take it ou",
        ),
        (f"train {TINY} --config.train.remat=full", "did you mean model.remat?"),
        (f"train {TINY} --config.train.=3", "'train.' is a section of the config, and no key; "),
        (f"train {TINY} --config.optimizer.lr=1", "did you mean optimizer.learning_rate?"),
        (
            "status --workdir=a --workdir=",
            "--workdir= is given without a value; leave that one out",
        ),
        ("generate runs", "did you mean --workdir=runs?"),
        ("evaluate runs/tiny", "did you mean --workdir=runs/tiny?"),
        ("generate --workdir=~/runs", "home/runs holds no run; name a run's workdir, such as "),
        ("generate --workdir=~nobody_here/w", "/~nobody_here/w holds no run"),
        (f"finetune {TINY} --workdir=w", "finetune needs --config=configs/finetune.py:lora (:f"),
        (
            f"plan {TINY} --topology=rtx4090:1",
            "there are the TPUs v2, v3, v4, v5e, v5p, v6e, tpu7x, the G",
        ),
        ("generate --workdir=runs", "runs holds no run; name a run's workdir, such as /"),
        (f"benchmark {TINY} --against={TINY[9:]},seed", "'seed' is not KEY=VALUE"),
        (f"benchmark {TINY} --against={TINY[9:]},train.sede=1", "did you mean "),
        (f"benchmark {TINY} --config.model.scan_unroll=99", "scan_unroll=99 is more than mod"),
        (f"plan {TINY} --topology=cpu:1 --config.model.scan_unroll=99", "unroll=99 is more than"),
        (f"sweep {TINY} --output=o --seeds=2 --config.train.profile=9:3", "such as 100:105"),
        (
            "analyze clustering --checkpoint=3",
            "is of a run, and clustering reads none",
        ),
        ("analyze spectrum --workdir=w", "takes spectra, lyapunov, clustering or all, not 'spec"),
        (f"sweep {TINY} --output=o --grid=num_steps=2,4", "did you mean model.num_steps?"),
        (f"sweep {TINY} --output=o --grid=init_from=w", "or to a sweep with --config=configs/fi"),
        (
            f"sweep {TINY} --output=o --config.data.source=text_files --grid=data.path=no.txt",
            "data.path=no.txt: there is no file or folder of that name",
        ),
        ("explore --workdir=w --output=a", "--output is not a flag of this verb; see --help"),
        ("convert --input=gpt2 --workdir=w", "hf download gpt2 --local-dir=DIR"),
        (f"train {TINY} --workdir=w -- --config.seed=1", "comes after -- alone, which ends the fl"),
        (f"train {TINY} --workdir=w --dry_run=maybe", "--dry_run=maybe must be true or false"),
        (f"train {TINY} --config.train.eval_batches=None", "only a config file can set a key to N"),
        (f"train {TINY} --config.data.path=None", "only a config file can set a key to None"),
        (f"train {TINY} --workdir=gs:/bucket/w", "--workdir=gs:/bucket/w names no bucket; write g"),
        ("evaluate --workdir=gs://", "--workdir=gs:// names no bucket; write gs://BUCKET/PATH"),
        ("evaluate --workdir=w --rtol=1e-3", "--rtol needs --scheme=bosh3 or another adaptive"),
        ("evaluate --workdir=w --scheme=x", "--scheme=x is unknown; there are euler, "),
        ("generate --workdir=w --prompt two words", "a text with spaces is put in quotes: --prom"),
        ("explore --workdir=runs/mine --host=a..b", "give an address of this machine, such as --"),
        (f"train {TINY} --workdir=w --nodry_run=1", "error: --nodry_run=1 does not take an argume"),
        (f"train {TINY} --config.model:num_steps=3", "is no key; write it as --config.model.num_"),
        (f"train {TINY} --config['seed']=3", "is no key; write it as --config.model.num_steps=VA"),
        ("reproduce figure5 --output=o", "did you mean --experiment=figure5?"),
        (f"prepare_data {TINY} --workdir=w", "did you mean --output?"),
        (f"sweep {TINY} --workdir=w", "did you mean --output?"),
        ("export --workdir=w --output_dir=o", "is not a flag of this verb; did you mean --output?"),
        ("export --run_name=w --output=o", "is not a flag of this verb; did you mean --workdir?"),
        ("generate --model=w --prompt=x", "did you mean --workdir?"),
        (
            "generate --workdir=w --prompt=x --scheme=rk4",
            "is not a flag of this verb; evaluate has it",
        ),
        ("generate --workdir=w --input=a.txt", "did you mean --prompt?"),
        ("generate --workdir=w --prompt=x --greedy", "did you mean --temperature=0?"),
        ("evaluate --workdir=w --split=test", "the run's validation text is evaluated; in Python"),
        ("evaluate --workdir=w --depths=2,3", "did you mean --num_steps?"),
        ("evaluate --workdir=w --config.data.path=a.txt", "load(DIR).loss(TEXT) takes any other"),
        ("evaluate --workdir=w --config.seed=3", "which takes the run's config; leave it"),
        ("generate --workdir=w --prompt=x --output=a", "goes to standard output: > FILE"),
        (f"train {TINY} --workdir=w --config.model.rope_scaling={{'a':2}}", "write a tuple, as in"),
        (
            f"train {TINY} --workdir=w --config.model.time_basis=legendre:0",
            "package.module:Name with k of at least 1",
        ),
        (f"train {TINY} --workdir=w --config.model.block=json:B", "json/__init__.py, and has JSON"),
        ("convert --workdir=w --model=gpt2", "did you mean --input?"),
        (f"benchmark {TINY} --steps=5", "did you mean --rounds or --config.train.total_steps?"),
        (f"prepare_data {TINY} --output=o --num_proc=4", "did you mean --workers?"),
        (f"train {TINY} --workdir=w --resume_from=r", "did you mean --branch_from?"),
        ("train --workdir=w -c a.py", "did you mean --config?"),
        (f"train {TINY} --workdir=w model.num_steps=4", "did you mean --config.model.num_steps=4"),
        (f"train {TINY} --workdir=w +seed=4", "did you mean --config.seed=4?"),
        (f"train {TINY} --output=w", "did you mean --workdir?"),
        (f"evaluate --workdir=w {TINY}", "which takes the run's config; leave it out"),
        ("analyze all spectra --workdir=w", "the analysis is one word and comes first"),
        (f"train {TINY} --config.data.streaming=True", "did you mean data.source?"),
        (f"train {TINY} --workdir=w --no_dry_run", "leave --dry_run out, or write --dry_run=false"),
        ("convert --workdir=w models/llama", "did you mean --input=models/llama?"),
        (f"sweep {TINY} --output=o --grid=seed=2 4", "separated by commas, without spaces"),
        ("reproduce --experiment=figure5 out", "'out' is not understood; flags are --name=value"),
        (f"train {TINY} --config.train.depths=(2,4", "a tuple; Python writes a tuple as (A,) or"),
        (f"train {TINY} --config.train.trackers=none", "tensorboard, wandb; () has no entries"),
        ("--workdir=w train", "comes before its flags; write python -m t5x_diffeq train --workdir"),
        ("train --config=configs/tiny.py#ode", "did you mean configs/tiny.py:ode?"),
        ("generate --workdir=w --checkpoint=latest", "best; for the newest, leave it out"),
        ("evaluate --workdir=w --num_steps=3 --num_steps=6", "separated by commas: --num_steps=A"),
        (f"train {TINY} --workdir=$SCRATCH/w", "has $SCRATCH, which the shell has not filled in"),
        (f"train {TINY} --workdir=C:\\runs\\w", "is a path of Windows; give one of this machine"),
        (f"train {TINY} --workdir=me@host:/runs/w", "is on another machine; mount it here, or ru"),
        (f"train {TINY} --workdir=/", "--workdir=/ is the root of all folders; name one in it"),
        (f"train {TINY} --workdir=runs/mine/checkpoints", "is a part of the run "),
        (f"sweep {TINY} --seeds=2 --output=runs/mine", "runs/mine is the workdir of a run; name"),
        (f"benchmark {TINY} --against=baseline", "--against=baseline: baseline: there is no such"),
        (f"benchmark {TINY} --against=:ode", "--against=:ode names no file; write FILE:VARIANT"),
        (f"plan {TINY} --topology=v5p:4x4", "a slice has the form v5p:2x2x1, without zeros"),
        (f"plan {TINY} --topology=v5e:0x4", "a slice has the form v5e:4x4, without zeros"),
        ("convert --input=https://huggingface.co/a/b --workdir=w", "give the name: --input=a/b"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(words, named, said, tmp_path):
    for runs in (tmp_path / "runs", tmp_path / "home" / "runs"):
        (runs / "tiny").mkdir(parents=True)
        (runs / "tiny" / "config.json").write_text("{}")
        (runs / "mine" / "checkpoints" / "3").mkdir(parents=True)
        (runs / "mine" / "config.json").write_text("{}")
    assert named in said(words)


@pytest.mark.parametrize("words", [["help", "plan"], ["--help", "plan"], ["plan", "--help"]])
def test_help_of_a_verb(words, monkeypatch, capsys):
    forget_flags(import_module("t5x_diffeq.cli.plan"))
    monkeypatch.setattr(sys, "argv", ["t5x_diffeq", *words])
    monkeypatch.setattr(command_line, "exit_process", sys.exit)  # this process goes on
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert not ended.value.code and "--topology" in capsys.readouterr().out


def test_names_in_other_projects_are_known():
    """Those of the page's table, each by its own key, and each key by what it is called here."""
    page = (ROOT / "docs" / "configuring.md").read_text()
    table = page.partition("## Names in other projects")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    keys = defaultdict(set)
    for row in rows:
        own, *others = (re.findall(r"`(?:--)?([\w.-]+)`", cell) for cell in row)
        for name in {name.replace("-", "_") for cell in others for name in cell} - NOT_KEYS:
            keys[name].update(own)
    for name, own in keys.items():
        assert {each.removeprefix("--") for each in keys_meant(name)} & own, (name, own)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([TINY, "--config.seed = 3"], "--config.seed = 3 has a space before the =; take it out"),
        ([TINY, " --dry_run"], "argument ' --dry_run' begins with a space; take it out"),
        ([TINY, "-n"], "error: --n is not a flag of this verb; see --help"),
        ([TINY, "--workdir= w"], "--workdir=' w' begins or ends with a space; leave that out"),
        ([f"{TINY} --workdir=w"], "--config has --workdir=w in its value; leave"),
    ],
)
def test_a_mistake_of_quoting_is_named(arguments, named, said):
    assert named in said(["train", *arguments])


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["config = tiny.get_config("], "own.py, line 3: '(' was never closed"),
        (
            ["config.model.n_layers = 3"],
            "line 4: config key 'model.n_layers' does not exist; did y",
        ),
        (
            ["config['model']['widht'] = 3"],
            "config key 'model.widht' does not exist; did you mean ",
        ),
        (
            ["config.model.update(num_step=3)"],
            "key 'model.num_step' does not exist; did you mean model.num_",
        ),
        (["config.modle.num_steps = 3"], "own.py, line 4: config key 'modle' does not exist; "),
        (
            ["config.model.num_steps = 'six'"],
            "own.py, line 4: model.num_steps is 'six'; it must be a whole number",
        ),
        (
            ["config = td.load_config('configs/tiny.py')", "config.seed = 3"],
            "this config is frozen",
        ),
        (
            ["FrozenConfigDict(config).seed = 3"],
            "own.py, line 4: this config is frozen; change wha",
        ),
        (["config.train.trackers = ('wandb')"], "must be a tuple; Python writes a tuple as (A,)"),
        (["del config.seed"], "line 4: keys can't be deleted; set the key to its default, or"),
        (["from .tiny import get_config"], "known parent package; import by name: from configs"),
        (["with config.unlocked():", "    config.train.epochs = 3"], "did you mean train.total_"),
        (["{}['widht']"], "own.py, line 4: KeyError: widht"),
        (["1 / 0"], "own.py, line 4: ZeroDivisionError: division by zero"),
        (["return td.load_config('configs/tiny.py')"], "get_config() returns a Config, not a Conf"),
    ],
)
def test_a_mistake_in_an_own_config_file_is_named_with_its_line(lines, named, said, tmp_path):
    imports = "import t5x_diffeq as td; from configs import tiny; from ml_collections import *"
    begin = [imports, "def get_config():", "config = tiny.get_config()"]
    if lines[0].endswith("("):
        begin.pop()
    head, *body = [*begin[1:], *lines, "return config"]
    text = "\n".join([imports, head, *(f"    {line}" for line in body)])
    (tmp_path / "own.py").write_text(text)
    assert named in said("train --config=own.py --workdir=w")


def test_a_config_file_of_another_kind(said, tmp_path):
    (tmp_path / "own.yaml").write_text("seed: 3")
    (tmp_path / "own.py").write_text("seed = 3")
    assert "own.yaml: a config file is written in Python" in said("train --config=own.yaml")
    assert "own.py has no function get_config()" in said("train --config=own.py")
    (tmp_path / "own.py").write_text("get_config = 3")
    assert "own.py has no function get_config()" in said("train --config=own.py")
    for parameters in ("*, variant", "variant, size"):
        (tmp_path / "own.py").write_text(f"def get_config({parameters}): pass")
        assert "let it have one parameter, the variant, with" in said("train --config=own.py:ode")
    (tmp_path / "own.py").write_text("seed = 3", encoding="utf-16")
    assert "own.py: source code string cannot contain null" in said("train --config=own.py")
    assert "--config is empty" in said("train --config= --workdir=w")
