"""docker/tpu.Dockerfile is built by buildah, and the image trains, is preempted, and continues.

The base image can't be had without a registry, so one is made under another name: Debian by
debootstrap from this machine's own package source, with this machine's Python 3.12. What is built
on top is the Dockerfile as it is.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import run_to_end
from patience import patience
from process_runs import small_training

pytestmark = pytest.mark.slow
BASE = "localhost/t5x_diffeq-base"
IMAGE = "localhost/t5x_diffeq-tpu"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
STEPS = 1000  # a busy machine looks rarely, and must still find it training
TRAIN = (
    "train",
    "--config=configs/shakespeare.py",
    "--workdir=/home/trainer/run",
    "--config.data.source=stdlib",
    *small_training(STEPS),
)


def python_of_images() -> Path | None:
    """The images' Python, 3.12: PYTHON_OF_IMAGES, or the first one that runs."""
    named = os.environ.get("PYTHON_OF_IMAGES")
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.12*/bin/python3.12"))
    found = shutil.which("python3.12")
    current = [sys.executable] if sys.version_info[:2] == (3, 12) else []
    for candidate in [named] if named else [*current, *pyenv, *([found] if found else [])]:
        command = [candidate, "-c", "import sys; print(sys.version_info[:2], sys.base_prefix)"]
        ended = run_to_end(command)
        if ended.returncode == 0 and ended.stdout.startswith("(3, 12)"):
            prefix = ended.stdout.split(maxsplit=2)[2].strip()
            return Path(prefix) / "bin" / "python3.12"
    return None


def find_missing_tool() -> str | None:
    """What is missing to build images here."""
    if os.geteuid() != 0:
        return "images are built as root here"
    for program in ("buildah", "debootstrap"):
        if not shutil.which(program):
            return f"{program} is not installed (on Debian: launch/ci_packages.sh)"
    if not python_of_images():
        return "no Python 3.12 here: PYTHON_OF_IMAGES names one"
    return None


def package_source() -> tuple[str, str]:
    """Release and address of the Debian that this machine's packages come from."""
    release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.search(r"(?m)^(?:URIs:|deb(?: \[.*\])?) *(\S+/debian)\b", text)
    return release[1], found[1] if found else "http://deb.debian.org/debian"


class Buildah:
    """buildah without a daemon, with its storage in a folder of its own."""

    def __init__(self, folder: Path):
        self.environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder)}
        self.storage = ("--root", folder / "storage", "--runroot", folder / "running")

    def command(self, *words) -> list[str]:
        return list(map(str, ("buildah", *self.storage, *words)))

    def __call__(self, *words) -> str:
        ended = run_to_end(self.command(*words), env=self.environment)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return ended.stdout.strip()


def make_base(buildah: Buildah, folder: Path) -> None:
    """Debian and Python 3.12, as far as an official Python image has them."""
    root, (release, address) = folder / "root", package_source()
    command = ["debootstrap", "--variant=minbase", release, root, address]
    ended = run_to_end(command)
    assert ended.returncode == 0, ended.stdout[-2000:]
    python = python_of_images()
    prefix = python.parents[1]
    leave_out = shutil.ignore_patterns("site-packages", "__pycache__", "test", "tests")
    shutil.copytree(prefix, root / str(prefix)[1:], symlinks=True, ignore=leave_out)
    library = root / str(prefix)[1:] / "lib" / "python3.12"
    (library / "site-packages").mkdir()
    for wanted in list_libraries(prefix):
        target = root / str(wanted)[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(wanted, target)
    (root / "etc/ld.so.conf.d/python.conf").write_text(f"{prefix}/lib\n")
    (root / CERTIFICATES[1:]).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(CERTIFICATES, root / CERTIFICATES[1:])
    for command in (["ldconfig"], [str(python), "-m", "ensurepip"]):
        subprocess.run(["chroot", root, *command], check=True, env={"PATH": "/usr/sbin:/usr/bin"})
    (root / "usr/local/bin/python").symlink_to(f"{prefix}/bin/python3.12")
    for folder_of in (root / str(prefix)[1:]).parents:
        if folder_of.is_relative_to(root) and folder_of != root:
            folder_of.chmod(0o755)  # the image's user has to get there
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, root, "/")
    for variable in ("SSL_CERT_FILE", "PIP_CERT"):
        buildah("config", "--env", f"{variable}={CERTIFICATES}", container)
    path = f"{prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    buildah("config", "--env", f"PATH={path}", container)
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(root)


def list_libraries(prefix: Path) -> set[Path]:
    """What the interpreter's modules are linked with, beside glibc."""
    modules = list((prefix / "lib" / "python3.12" / "lib-dynload").glob("*.so"))
    said = run_to_end(["ldd", *modules]).stdout
    return {Path(found) for found in re.findall(r"=> (/(?:usr/)?lib/\S+)", said)}


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """buildah, and a container of the image."""
    if reason := find_missing_tool():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("images")
    buildah = Buildah(folder)
    begun = time.monotonic()
    make_base(buildah, folder)
    print(f"base after {time.monotonic() - begun:.0f} s")
    buildah(
        *("bud", "--pull-never", "--network=host", "--quiet", "--platform=linux/amd64"),
        *(f"--build-arg=BASE={BASE}", "--build-arg=REVISION=abc", "--file=docker/tpu.Dockerfile"),
        *(f"--tag={IMAGE}", "."),
    )
    print(f"image after {time.monotonic() - begun:.0f} s")
    yield buildah, buildah("from", "--pull-never", IMAGE)
    buildah("rm", "--all")  # and what it has mounted
    buildah("rmi", "--all", "--force")
    shutil.rmtree(folder, ignore_errors=True)


def start(container, *words, **variables) -> subprocess.Popen:
    """The image's entry point, as its user."""
    buildah, name = container
    given = [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
    command = buildah.command("run", *given, name, "--", "/opt/t5x_diffeq/verb.sh", *words)
    return subprocess.Popen(
        command,
        env=buildah.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps(root: Path) -> list[int]:
    path = root / "home/trainer/run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    reports = [json.loads(line) for line in lines if line.endswith("\n")]
    return [report["step"] for report in reports if "train/loss" in report]


def trainer() -> int:
    """The number of the training's process."""
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = status.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"/opt/t5x_diffeq/verb.sh" in words and words[0].endswith(b"bash"):
            return int(status.parent.name)
    raise AssertionError("nothing trains")


def trains_is_preempted_and_continues(container):
    buildah, name = container
    root = Path(buildah("mount", name))
    process = start(container, *TRAIN, JAX_PLATFORMS="cpu")
    while len(steps(root)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    os.kill(trainer(), signal.SIGTERM)  # as Kubernetes does, to the container's first process
    log = process.communicate(timeout=patience(240))[0]
    assert process.returncode == 42, log
    done = steps(root)
    assert 3 <= len(done) < STEPS
    process = start(container, *TRAIN, JAX_PLATFORMS="cpu")
    log = process.communicate(timeout=patience(240))[0]
    assert process.returncode == 0, log
    assert steps(root) == list(range(1, STEPS + 1))
    assert (root / "home/trainer/run/metrics.jsonl").stat().st_uid == 1000


def fails_without_a_tpu(container):
    log = start(container, *TRAIN).communicate(timeout=patience(240))[0]
    assert "error:" in log


def has_label_user_and_size(container):
    buildah, _ = container
    facts = json.loads(buildah("inspect", "--type=image", IMAGE))["OCIv1"]["config"]
    assert facts["Labels"]["org.opencontainers.image.revision"] == "abc"
    assert facts["User"] == "1000"
    listed = json.loads(buildah("images", "--json"))
    sizes = {name: image["size"] for image in listed for name in image.get("names") or []}
    print(sizes)
    assert any(name.startswith(IMAGE) for name in sizes)


@pytest.mark.in_turns("images and compilers")
def test_the_image(container):
    """In one test, because the image is built once in each process that runs tests of this file."""
    has_label_user_and_size(container)
    fails_without_a_tpu(container)
    trains_is_preempted_and_continues(container)
