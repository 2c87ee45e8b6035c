"""A tiny training for the scripts of launch/: its words, its speed, its faults, its steps."""

import subprocess
from pathlib import Path

import warm_python
from helpers import ROOT, metrics_of, numbered_lines
from patience import wait_for
from process_runs import HEAR_CTRL_C
from stand_ins import add_python, clean_environment, mark_installed, slow_training

STEPS = 40


class LaunchedRun:
    """One workdir, and the environment for the scripts that train in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        self.workdir = folder / "run"
        self.set(seconds=0.0)
        text = folder / "the $(text) 'is' \"here\".txt"
        text.write_text(numbered_lines(200))
        # The user's own file, under the name of one of the project's.
        (folder / "configs").mkdir()
        (folder / "configs" / "tiny.py").write_text(
            "from configs import default\n\n\ndef get_config():\n"
            "    config = default.get_config()\n"
            "    config.model.update(num_steps=2, embed_dim=16, num_heads=2, mlp_dim=32,\n"
            "        time_embed_dim=4, num_frequencies=4, remat='none')\n"
            "    config.data.update(source='text_files', tokenizer='bytes', sequence_length=16)\n"
            f"    config.train.update(total_steps={STEPS}, batch_size=8, eval_batch_size=8,\n"
            "        eval_batches=1, log_every=1, eval_every=1000, checkpoint_every=10)\n"
            "    return config\n"
        )
        self.words = [
            "configs/tiny.py",
            "--workdir=run",
            f"--config.data.path={text}",
            "--unchecked",  # `check_run_test.py` checks configs
            f"--env=TRAIN_CONTROL={folder}",
            "--env=JAX_PLATFORMS=cpu",
            "--env=OMP_NUM_THREADS=1",
        ]
        self.installed_at = self.install()
        self.environment = {
            **clean_environment(),
            "VENV": str(self.installed_at),
            "LAUNCH_POLL_SECONDS": "1",
        }

    def install(self) -> Path:
        """An environment that `setup` takes as made; its trainings are `slow_train.py`."""
        venv = self.folder / "venv"
        add_python(venv, slow_training(warm_python.executable()))
        mark_installed(venv, ("gpu,data,gcs,trackers,analysis",))
        return venv

    def set(self, seconds: float | None = None, fault: str = "") -> None:
        """How long steps take from now on; a fault to come."""
        if seconds is not None:
            (self.folder / "new").write_text(str(seconds))
            (self.folder / "new").rename(self.folder / "seconds")
        if fault:
            (self.folder / "fault").write_text(fault)

    def reports(self) -> list[dict]:
        """What stands in metrics.jsonl of the training steps, but for rates."""
        return [report for report in metrics_of(self.workdir) if "train/loss" in report]

    def is_done(self) -> bool:
        """Whether every step was reported once."""
        return [report["step"] for report in self.reports()] == [*range(1, STEPS + 1)]

    def step(self) -> int:
        """The last that was reported."""
        reports = self.reports()
        return reports[-1]["step"] if reports else 0

    def processes(self) -> list[int]:
        """The numbers of its processes, by rank."""
        pattern = f"slow_train.py .*{self.folder}/"
        listed = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True)
        return sorted(map(int, listed.stdout.split()), key=rank)

    def launch(self, script: str, *arguments: str, log: Path, **more: str) -> subprocess.Popen:
        """A script of launch/, started in the run's folder; what it says goes to `log`."""
        return launch(script, *arguments, log=log, cwd=self.folder, env=self.environment | more)


def launch(script: str, *arguments: str, log: Path, **options) -> subprocess.Popen:
    """A script of launch/, in a process group of its own; what it says goes to `log`."""
    command = [*HEAR_CTRL_C, ROOT / "launch" / script, *arguments]
    none = subprocess.DEVNULL
    with open(log, "w") as said:
        return subprocess.Popen(
            command, stdin=none, stdout=said, stderr=said, start_new_session=True, **options
        )


def rank(pid: int) -> int:
    """What the process was told by its launcher."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    told = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    return int(told.get("JAX_PROCESS_ID") or told["SLURM_PROCID"])


def wait_for_text(process: subprocess.Popen, log: Path, text: str, after: str = "") -> None:
    """Waits until the log of a process has the text, behind another one."""

    def is_so() -> bool:
        ended = process.poll() is not None
        said = log.read_text()
        found = text in (said.partition(after)[2] if after else said)
        assert found or not ended, said
        return found

    wait_for(is_so)


def steps_after_stops(log: str) -> tuple[list[int], list[int]]:
    """After which steps a run was stopped and saved, and at which it went on."""
    stopped = [words.partition(",")[0] for words in log.split(" after step ")[1:]]
    continued = [words.split()[0] for words in log.split("continuing at step ")[1:]]
    return [*map(int, stopped)], [*map(int, continued)]
