"""Eight virtual CPU devices, checked array shapes, and the smallest runs that mean something."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = tempfile.TemporaryDirectory(prefix="t5x_diffeq-tests-")
os.environ["T5X_DIFFEQ_CACHE"] = CACHE.name
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
install_import_hook("t5x_diffeq", "typecheck.checked")

from helpers import LENGTH_OF_LINES, LINES, numbered_lines, small_config
from ml_collections import ConfigDict
from stand_ins import StandIns

from t5x_diffeq.runs import load
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.training import setup
from t5x_diffeq.verbs import train


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also train and kill whole processes")
    parser.addoption("--whole", action="store_true", help="every fault of a table, not a sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="slow: run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_setup_per_config():
    """Runs of equal configs share their compiled steps: compilation is what takes the time."""
    setups = {}

    def shared_setup(config: ConfigDict, vocab_size: int) -> setup.Setup:
        changing = ("log_every", "eval_every", "checkpoint_every")
        train = {k: v for k, v in config.train.items() if k not in changing}
        data = (config.data.sequence_length, config.data.cross_documents)
        key = repr((config.model, data, config.optimizer, config.mesh, train, config.seed))
        if (key, vocab_size) not in setups:
            setups[key, vocab_size] = setup.setup_of(config, vocab_size)
        return setups[key, vocab_size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_setup", shared_setup)
        patch.setattr(load, "make_setup", shared_setup)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 200 lines, which no test changes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(numbered_lines(200))
    return path


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
def run_on_lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run that was trained on LINES for 20 steps."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "text.txt").write_text(LINES)
    config = small_config(folder / "text.txt")
    config.data.sequence_length = LENGTH_OF_LINES
    config.mesh.fsdp = 1
    config.optimizer.learning_rate = 0.01
    config.train.update(total_steps=20, checkpoint_every=20, eval_every=20)
    assert train.train(Config.of(config), folder / "run") == 0
    return folder / "run"
