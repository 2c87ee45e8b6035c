"""launch/check_run.py: what is wrong with a run is told at once, before machines are requested."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from stand_ins import StandIns, stand_ins_fixture  # noqa: F401

DATA = ("--config.data.source=text_files", "--config.data.path=/texts")


@pytest.fixture
def check(stand_ins: StandIns):
    """launch/tpu_pod.sh with a real Python in its environment, up to what it asks of gcloud."""
    python = stand_ins.installed() / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    environment = stand_ins.environment(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))

    def run(*words):
        command = [ROOT / "launch" / "tpu_pod.sh", *words, "--dry-run"]
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert stand_ins.calls() == []
        return ended

    return run


@pytest.mark.slow
def test_all_that_is_missing_is_told_at_once(check):
    ended = check("configs/llama1b.py", "--config.train.batchsize=3", "--config.seed=x")
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    told = [line for line in lines if line.startswith("  - ")]
    for line, part in zip(
        told,
        (
            "--type=v5p-128",
            "--workdir=gs://BUCKET",
            "'train.batchsize' does not exist; did you mean train.batch_size",
            "config.seed=x can't be used",
            "--config.data.path for data.source=text_files",
        ),
        strict=True,
    ):
        assert part in line
    assert lines[-1].startswith("error: 5 things are missing or wrong")
    assert "launch/tpu_pod.sh configs/llama1b.py --type=v5p-128" in lines[-1]
    assert "+ gcloud" not in ended.stdout


WRONG = {
    "--slices=3": "batch size 256 is not divisible by 192 devices",
    "--config.data.source=parquet": "data.source is 'parquet'; it can be",
    "--config.data.packing=tight": "data.packing is 'tight'",
    "--config.train.depths=(0,)": "train.depths is (0,)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [WRONG, {"--config.mesh.tensor=32": "axis 'heads' of size 16 is not divisible by 32"}]
)
def test_values_data_and_mesh(check, wrong):
    place = ("--type=v5p-128", "--workdir=/mounted/run", "--mounted")
    ended = check("configs/llama1b.py", *place, *DATA, *wrong)
    assert ended.returncode == 2
    for message in wrong.values():
        assert message in ended.stderr
    assert sum(line.startswith("  - ") for line in ended.stderr.splitlines()) == len(wrong)
    assert "+ gcloud" not in ended.stdout


@pytest.mark.slow
def test_what_is_right_is_requested(check):
    """The mesh's data axis is the number of slices."""
    place = ("--type=v5p-128", "--slices=2", "--workdir=/mounted/run", "--mounted")
    ended = check("configs/llama1b.py", *place, *DATA)
    assert ended.returncode == 0, ended.stderr
    assert "the mesh: data 2 x fsdp 64 x tensor 1 on 128 devices" in ended.stderr
    assert "+ gcloud compute tpus queued-resources create" in ended.stdout


@pytest.mark.slow
def test_a_config_of_ones_own_is_checked(check, tmp_path):
    mine = tmp_path / "llama1b.py"
    mine.write_text("def get_config():\n    raise ValueError('mine is wrong')\n")
    ended = check(str(mine), "--type=v5p-128", "--workdir=/mounted/run", "--mounted")
    assert ended.returncode == 2
    assert "mine is wrong" in ended.stderr


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached(check, monkeypatch):
    """Refused at once: the credentials are those of nobody."""
    from fake_gcs import serving

    with serving() as (store, environment):
        store.put("bucket", "texts/a.txt", b"text")
        os.environ.update(environment)
        command = [
            sys.executable,
            ROOT / "launch" / "check_run.py",
            "--count=4",
            "--example=x",
            "--",
        ]
        given = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        words = ("--config=configs/tiny.py", "--workdir=gs://bucket/run")
        data = ("--config.data.source=text_files", "--config.data.path=gs://bucket/texts")
        ended = subprocess.run([*command, *words, *data], env=given, cwd=ROOT, capture_output=True)
        assert ended.returncode == 0, ended.stderr
        none = (data[0], "--config.data.path=gs://bucket/none")
        ended = subprocess.run(
            [*command, *words, *none], env=given, cwd=ROOT, capture_output=True, text=True
        )
        assert "data.path=gs://bucket/none: there is nothing" in ended.stderr
        store.refuse = lambda method, path: 403
        ended = subprocess.run(
            [*command, *words, *none], env=given, cwd=ROOT, capture_output=True, text=True
        )
        assert ended.stderr.count("can't be reached") == 2
