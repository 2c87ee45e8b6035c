"""launch/check_run.py: what is wrong with a run is told at once, before machines are requested."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT
from stand_ins import StandIns, add_python

DATA = ("--config.data.source=text_files", "--config.data.path=/texts")


@pytest.fixture
def check(stand_ins: StandIns):
    """A script with a real Python in its environment, up to the first command that it would run."""
    add_python(stand_ins.install())
    environment = stand_ins.environment(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))

    def run(*words, script="tpu_pod.sh", **more):
        command = [ROOT / "launch" / script, *words, "--dry-run"]
        options = {"cwd": ROOT, "capture_output": True, "text": True}
        ended = subprocess.run(command, env={**environment, **more}, **options)
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
            "config.seed=x is invalid",
            "--config.data.path for data.source=text_files",
        ),
        strict=True,
    ):
        assert part in line
    assert lines[-1].startswith("error: 5 settings are missing or invalid")
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


PLACES = {
    "gpu_slurm.sh": (["--nodes=3"], "256 is not divisible by 24 devices", "+ sbatch"),
    "gpu_nodes.sh": (["--hosts=a,b,c", "--processes_per_host=8"], "by 24 devices", "+ ssh"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", PLACES)
def test_clusters_that_share_files(check, script, tmp_path):
    """Keys, values, data and mesh are checked with the environment that is there."""
    place, mesh, submitted = PLACES[script]
    (tmp_path / "empty").mkdir()
    words = ("configs/llama1b.py", f"--workdir={tmp_path}", *place)
    data = ("--config.data.source=text_files", f"--config.data.path={tmp_path / 'empty'}")
    wrong = ("--config.train.batchsize=3", "--config.model.remat=all")
    ended = check(*words, *data, *wrong, script=script)
    assert ended.returncode == 2
    told = [line for line in ended.stderr.splitlines() if line.startswith("  - ")]
    for line, part in zip(
        told,
        (
            "'train.batchsize' does not exist; did you mean train.batch_size",
            "model.remat is 'all'; it can be",
            f"data.path={tmp_path / 'empty'}: nothing is there",
            mesh,
        ),
        strict=True,
    ):
        assert part in line
    assert submitted not in ended.stdout
    (tmp_path / "empty" / "a.txt").write_text("text")
    right = ("--config.train.batch_size=240", "--config.mesh.data=3")
    ended = check(*words, *data, *right, script=script)
    assert ended.returncode == 0, ended.stderr
    assert "the mesh: data 3 x fsdp 8 x tensor 1 on 24 devices" in ended.stderr
    assert submitted in ended.stdout


@pytest.mark.slow
def test_one_process_per_host_leaves_the_mesh_to_the_run(check):
    """How many GPUs a host has can't be known; the rest is checked, on one device."""
    words = ("configs/llama1b.py", "--workdir=/shared/run", "--hosts=a,b", *DATA)
    ended = check(*words, "--config.model.num_heads=7", script="gpu_nodes.sh")
    assert ended.returncode == 2
    assert "model.embed_dim=2048 is not divisible by model.num_heads=7" in ended.stderr


@pytest.mark.parametrize("script", PLACES)
def test_where_there_is_no_environment_a_line_says_so(check, script, tmp_path):
    """--dry-run makes none, and prints what it would run."""
    place, _, submitted = PLACES[script]
    words = ("configs/llama1b.py", "--workdir=/shared/run", *place, "--config.seed=x")
    ended = check(*words, script=script, VENV=str(tmp_path / "none"))
    assert ended.returncode == 0
    assert ended.stderr.splitlines() == [
        f"note: the config is not checked here, because there is no environment in {tmp_path}/none"
        "; the run checks it"
    ]
    assert submitted in ended.stdout


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
    from bucket_server import serve

    with serve() as (store, environment):
        store.put("texts/a.txt", b"text")
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
        assert "data.path=gs://bucket/none: nothing is there" in ended.stderr
        store.refuse = lambda method, path: 403
        ended = subprocess.run(
            [*command, *words, *none], env=given, cwd=ROOT, capture_output=True, text=True
        )
        assert ended.stderr.count("can't be reached") == 2
