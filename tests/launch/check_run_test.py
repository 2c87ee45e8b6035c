"""launch/check_run.py: what is wrong with a run is told at once, before machines are requested."""

import subprocess

import pytest
from bucket_server import serve
from helpers import ROOT
from stand_ins import StandIns, add_python

pytestmark = pytest.mark.in_turns
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


SUBMITTED = ("+ gcloud", "+ sbatch", "+ ssh")


def assert_told(ended, *parts):
    """These problems, in this order, a line each; nothing is requested."""
    assert ended.returncode == 2, ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("  - ")]
    for line, part in zip(told, parts, strict=True):
        assert part in line
    assert not any(command in ended.stdout for command in SUBMITTED)


@pytest.mark.slow
def test_all_that_is_missing_is_told_at_once(check):
    ended = check("configs/llama1b.py", "--config.train.batchsize=3", "--config.seed=x")
    assert_told(
        ended,
        "--type=v5p-128",
        "--workdir=gs://BUCKET",
        "'train.batchsize' does not exist; did you mean train.batch_size",
        "config.seed=x is invalid",
        "--config.data.path for data.source=text_files",
    )
    assert "launch/tpu_pod.sh configs/llama1b.py --type=v5p-128" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_config_that_ends_the_process_is_not_taken_for_checked(check, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit(0)\n")
    ended = check(tmp_path / "mine.py", *TPU[1:])
    assert_told(ended, "mine.py ends the process (SystemExit: 0)")


TPU = ("configs/llama1b.py", "--type=v5p-128", "--workdir=/mounted/run", "--mounted", *DATA)


@pytest.mark.slow
def test_values_and_mesh_on_tpus(check):
    """The mesh's data axis is the number of slices."""
    ended = check(*TPU, "--slices=3", "--config.train.depths=(0,)")
    assert_told(ended, "train.depths is (0,)", "256 is not divisible by 192 devices")
    ended = check(*TPU, "--slices=2")
    assert ended.returncode == 0, ended.stderr
    assert "the mesh: data 2 x fsdp 64 x tensor 1 on 128 devices" in ended.stderr
    assert "+ gcloud compute tpus queued-resources create" in ended.stdout


PLACES = {
    "gpu_slurm.sh": (["--nodes=3"], "+ sbatch"),
    "gpu_nodes.sh": (["--hosts=a,b,c", "--processes_per_host=8"], "+ ssh"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", PLACES)
def test_clusters_that_share_files(check, script, tmp_path):
    """Keys, values, data and mesh are checked with the environment that is there. A source of one's
    own is not called."""
    place, submitted = PLACES[script]
    (tmp_path / "empty").mkdir()
    data = ("--config.data.source=text_files", f"--config.data.path={tmp_path / 'empty'}")
    words = ("configs/llama1b.py", f"--workdir={tmp_path}", *place, *data)
    ended = check(*words, "--config.model.remat=all", script=script)
    nothing = f"data.path={tmp_path / 'empty'}: nothing is there"
    assert_told(ended, "model.remat is 'all'; it can be", nothing, "not divisible by 24 devices")
    (tmp_path / "empty" / "a.txt").write_text("text")
    (tmp_path / "mine.py").write_text("def texts(data) -> tuple: raise ValueError('called')\n")
    parts = ((1, "text_files", str(tmp_path / "empty")), (1, "mine:texts", "on/the/machines"))
    mixture = ("--config.data.source=mixture", f"--config.data.mixture={parts}")
    words = (*words[:-2], *mixture)
    more = {"script": script, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    ended = check(*words, "--config.train.batch_size=240", "--config.mesh.data=3", **more)
    assert ended.returncode == 0, ended.stderr
    assert "the mesh: data 3 x fsdp 8 x tensor 1 on 24 devices" in ended.stderr
    assert submitted in ended.stdout


@pytest.mark.slow
def test_keys_of_an_array_of_jobs(check):
    words = ("slurm", "configs/tiny.py", "--output=/out", "--config.data.sorce=x")
    ended = check(*words, script="prepare_data.sh")
    assert ended.returncode == 2 and "did you mean data.source?" in ended.stderr
    assert "+ sbatch" not in ended.stdout


def test_where_there_is_no_environment_a_line_says_so(check, tmp_path):
    """--dry-run makes none, and prints what it would run."""
    words = ("configs/llama1b.py", "--workdir=/shared/run", "--hosts=a,b", "--config.seed=x")
    ended = check(*words, script="gpu_nodes.sh", VENV=str(tmp_path / "none"))
    assert ended.returncode == 0
    assert f"there is no environment in {tmp_path}/none" in ended.stderr
    assert "+ ssh" in ended.stdout


@pytest.mark.slow
def test_a_config_of_ones_own_is_checked(check, tmp_path):
    mine = tmp_path / "llama1b.py"
    mine.write_text("def get_config():\n    raise ValueError('mine is wrong')\n")
    assert_told(check(str(mine), *TPU[1:4]), "mine is wrong")


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached(check):
    words = ("configs/tiny.py", "--type=v5p-8", "--workdir=gs://bucket/run", DATA[0])
    with serve() as (store, environment):
        store.put("texts/a.txt", b"text")
        ended = check(*words, "--config.data.path=gs://bucket/texts", **environment)
        assert ended.returncode == 0, ended.stderr
        none = "--config.data.path=gs://bucket/none"
        assert_told(check(*words, none, **environment), "path=gs://bucket/none: nothing is there")
        store.refuse = lambda method, path: 403
        assert_told(check(*words, none, **environment), *["can't be reached"] * 2)
        store.refuse = lambda method, path: 401
        ended = check(*words, none, **environment)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("note: not checked, the run will: ") == 2
        assert "+ gcloud" in ended.stdout
