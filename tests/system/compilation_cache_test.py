"""The cache of compiled programs: where it may be, and what is said of it."""

import os
import sys
import textwrap

import jax
import pytest
from bucket_server import serve
from helpers import run_to_end

from t5x_diffeq.system import compilation_cache
from t5x_diffeq.system.compilation_cache import enable_cache

# A process of one device that enables the cache as a verb does, and compiles a program.
PROGRAM = """
    import sys
    import jax, jax.numpy as jnp
    from t5x_diffeq.cli.quiet_libraries import silence_libraries
    from t5x_diffeq.system.compilation_cache import enable_cache

    silence_libraries()
    programs = enable_cache()
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
    print(programs)
"""


def compile_in(home, **variables):
    """What such a process prints of its programs, and its messages."""
    ended = run_to_end(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "XLA_FLAGS": "", "HOME": str(home), **variables},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip(), ended.stderr


def test_a_second_process_compiles_nothing_and_replaces_what_was_cut_off(tmp_path):
    folder = tmp_path / ".cache" / "t5x_diffeq" / "compilation"
    first, said = compile_in(tmp_path)
    assert first.startswith("programs: 0 read, ") and first.endswith(str(folder))
    assert said == ""
    compiled = int(first.split()[3])
    assert len(list(folder.glob("*-cache"))) == compiled > 0

    # A process that is killed as it writes leaves this.
    entry = min(folder.glob("*-cache"))
    entry.write_bytes(entry.read_bytes()[:9])
    entry.with_name(entry.name.replace("-cache", "-atime")).unlink()
    second, said = compile_in(tmp_path)
    assert (second.split(";")[0], said) == (f"programs: {compiled - 1} read, 1 compiled", "")
    third, _ = compile_in(tmp_path)
    assert third.split(";")[0] == f"programs: {compiled} read, 0 compiled"


@pytest.mark.slow
def test_a_second_machine_reads_all_programs_from_the_bucket(tmp_path):
    """By jax's own reader of buckets; the server is others' (bucket_server.py)."""
    with serve() as (_, environment):
        environment["JAX_COMPILATION_CACHE_DIR"] = "gs://bucket/runs/compilation_cache"
        first, said = compile_in(tmp_path / "one", **environment)
        assert first.startswith("programs: 0 read, ") and said == ""
        second, said = compile_in(tmp_path / "two", **environment)
    compiled = first.split()[3]
    assert second.startswith(f"programs: {compiled} read, 0 compiled") and said == ""


def test_what_jax_says_of_a_folder_that_fails_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    inside = str(tmp_path / "file" / "cache")
    programs, said = compile_in(tmp_path, JAX_COMPILATION_CACHE_DIR=inside)
    assert programs.startswith("programs: 0 read, ") and programs.endswith(inside)
    assert said.startswith("warning: Error reading persistent compilation cache entry for ")
    assert "NotADirectoryError" in said and said.count("\n") == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's folder, for a process that has one device."""
    monkeypatch.setattr(compilation_cache, "_FOLDER", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation_cache.jax, "device_count", lambda: 1)
    never = "jax_compilation_cache_dir"
    monkeypatch.setattr(
        compilation_cache.jax.config,
        "update",
        lambda key, _: pytest.fail("it was enabled") if key == never else None,
    )
    return tmp_path / "cache"


def test_without_filelock_the_way_out_is_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(compilation_cache.importlib.util, "find_spec", lambda name: None)
    assert str(enable_cache()).endswith("compilation cache: off")
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and said.count("\n") == 1
    assert "pip install filelock" in said


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder.write_text("a file"), "can't be used: File exists"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), "chmod 700"),
        (lambda folder: (folder.mkdir(), os.chown(folder, 12345, -1)), "belongs to another user"),
    ],
)
def test_a_folder_that_cannot_be_trusted_or_used(folder, capsys, make, reason):
    try:
        make(folder)
    except PermissionError:
        pytest.skip("only root can give a folder away")
    assert str(enable_cache()).endswith("compilation cache: off")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and reason in said


def test_several_devices_of_a_cpu_have_none(capsys, monkeypatch):
    """Nor where a launcher names a place: they would wait for each other for ever."""
    set_to = {}
    monkeypatch.setattr(compilation_cache.jax.config, "update", set_to.__setitem__)
    monkeypatch.setitem(jax.config.values, "jax_compilation_cache_dir", "gs://bucket/cache")
    assert "several CPU devices" in str(enable_cache())
    assert set_to["jax_enable_compilation_cache"] is False
    assert capsys.readouterr().err == ""
