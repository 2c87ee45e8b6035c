"""Eight virtual CPU devices, checked array shapes, and the smallest runs that mean something."""

import gc
import hashlib
import os
import random
import shutil
import subprocess
import tempfile

import compilation

from t5x_diffeq.config.config import Config

os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = tempfile.TemporaryDirectory(prefix="t5x_diffeq-tests-")
os.environ["T5X_DIFFEQ_CACHE"] = CACHE.name
os.environ["XLA_FLAGS"] = compilation.DEVICES

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import filelock
import jax
import psutil
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]
_CODE = ("configs", "examples", "launch", "studies", "t5x_diffeq", "tests")


def _state_of_code() -> str:
    """A hash of the committed code, which pages don't change; empty outside a clone."""
    folders = [f"HEAD:{name}" for name in _CODE]
    asked = subprocess.run(["git", "-C", ROOT, "rev-parse", *folders], capture_output=True)
    return hashlib.sha256(asked.stdout).hexdigest()[:7] if asked.returncode == 0 else ""


# The same code has the same sample on every day and in every worker.
SAMPLE = os.environ.setdefault("T5X_DIFFEQ_SAMPLE", _state_of_code())
sys.path.insert(0, str(ROOT))
pytest_plugins = ["cpu_seconds"]
install_import_hook(["t5x_diffeq", "studies"], "typecheck.check_types")
PROGRAMS = compilation.SharedPrograms()
PROGRAMS.use()

from fault_checkpoints import save_some
from helpers import LENGTH_OF_LINES, LINES, numbered_lines, small_config
from ml_collections import ConfigDict
from stand_ins import StandIns

from t5x_diffeq.cli.train import train_to_end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="also what compiles for long, and whole processes"
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="all cases of the tables, in the sizes of READMEs, compiled as users' programs are",
    )


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--whole"):
        return "tables of cases: all"
    return f"tables of cases: a sample; T5X_DIFFEQ_SAMPLE={SAMPLE} takes the same, --whole all"


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--whole"):
        os.environ["XLA_FLAGS"] = f"{compilation.DEVICES} {compilation.QUICK}"


def pytest_collection_finish() -> None:
    # Modules and tests stay, and tracing makes few cycles: a garbage collector that runs seldom
    # and leaves them out saves a twelfth of the time (fast tests of blocks and objectives).
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") and not config.getoption("--whole"):
        left_out = _cases_left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    # Whole processes keep time with each other, which a busy machine can upset.
    again = pytest.mark.flaky(reruns=1)
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(again if config.getoption("--slow") else skip)


def _cases_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Two thirds of the cases of each slow test, others for each commit; none of `every_case`.

    Of slow tests that are `in_turns` these are three quarters: of those of a file, or of all that
    name the same group.
    """
    cases: dict[tuple[str, float], list[pytest.Item]] = {}
    for item in items:
        if "slow" in item.keywords and "every_case" not in item.keywords:
            turns = item.get_closest_marker("in_turns")
            group = turns.args[0] if turns and turns.args else item.nodeid.partition("::")[0]
            test = (group, 3 / 4) if turns else (item.nodeid.partition("[")[0], 2 / 3)
            cases.setdefault(test, []).append(item)
    return {
        case
        for (test, share), of_test in cases.items()
        for case in random.Random(f"{SAMPLE} {test}").sample(of_test, int(len(of_test) * share))
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A failure that a second try hides is shown as what it is."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"FAILED, and was tried again: {report.nodeid}", red=True)
        terminalreporter.line(report.longreprtext)


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether tests take all cases of their tables, and the sizes of which READMEs have figures."""
    return request.config.getoption("--whole")


@pytest.fixture
def sample(request: pytest.FixtureRequest, whole: bool) -> Callable[[Iterable], list]:
    """Takes a third of a table's cases, or `most`, in order: others for each commit; or all."""
    chance = random.Random(f"{SAMPLE} {request.node.name}")

    def sample(cases: Iterable, most: int | None = None) -> list:
        cases = list(cases)
        count = len(cases) if whole else min(-(-len(cases) // 3), most or len(cases))
        return [cases[number] for number in sorted(chance.sample(range(len(cases)), count))]

    return sample


@pytest.fixture(scope="module", autouse=True)
def memory_for_others() -> Iterator[None]:
    """Compiled programs are forgotten once a worker holds 4 GB, as several run at once."""
    yield
    if psutil.Process().memory_info().rss > 4e9:
        PROGRAMS.clear()
        jax.clear_caches()


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], None]], Path]:
    """Makes a folder by a function that fills it, once for all workers; no test changes it."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent

    def made_once(name: str, fill: Callable[[Path], None]) -> Path:
        folder, ready = root / f"shared-{name}", root / f"shared-{name}.ready"
        with filelock.FileLock(root / f"shared-{name}.lock"):
            if not ready.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                ready.touch()
        return folder

    return made_once


@pytest.fixture(scope="session")
def text(made_once: Callable) -> Path:
    """A text of 200 lines, which no test changes."""

    def fill(folder: Path) -> None:
        (folder / "text.txt").write_text(numbered_lines(200))

    return made_once("text", fill) / "text.txt"


@pytest.fixture
def small(tmp_path: Path) -> ConfigDict:
    """A run of seconds: bytes of a little text, width 16, two steps."""
    text = tmp_path / "text.txt"
    text.write_text(numbered_lines(200))
    return small_config(text)


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    """Stand-ins for the programs that the scripts of launch/ call."""
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    return StandIns(folder)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints 2, 4 and 6 of a little train state, which no test changes."""
    return save_some(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def workdir(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved`."""
    return shutil.copytree(saved, tmp_path / "workdir")


@pytest.fixture(scope="session")
def finished(text: Path, made_once: Callable) -> tuple[ConfigDict, Path]:
    """The config and workdir of a finished run on one device; no test changes it.

    It has dropout, and only its last evaluation takes the whole split.
    """
    config = small_config(text)
    config.model.dropout_rate = 0.1
    config.mesh.fsdp = 1
    config.train.update(eval_batches=1, eval_all_at_end=True)

    def fill(workdir: Path) -> None:
        assert train_to_end(Config.of(config), workdir) == 0

    return config, made_once("finished", fill)


@pytest.fixture(scope="session")
def run_on_lines(made_once: Callable) -> Path:
    """The workdir of a run that was trained on LINES for 20 steps."""

    def fill(folder: Path) -> None:
        (folder / "text.txt").write_text(LINES)
        config = small_config(folder / "text.txt")
        config.data.sequence_length = LENGTH_OF_LINES
        config.mesh.fsdp = 1
        config.optimizer.learning_rate = 0.01
        config.train.update(total_steps=20, checkpoint_every=20, eval_every=20)
        assert train_to_end(Config.of(config), folder / "run") == 0

    return made_once("lines", fill) / "run"
