"""Sources: splits, order, fingerprints, and files that are no text."""

import subprocess
import sys

import pytest

from t5x_diffeq.data.sources import find_text_files, load_source, stdlib, text_files
from t5x_diffeq.errors import InputError


def test_stdlib_is_split_by_file_and_the_same_in_every_process():
    source = stdlib()
    assert len(source.train) > 10 * len(source.validation) > 100
    assert not set(source.train) & set(source.validation)
    code = "from t5x_diffeq.data.sources import stdlib; print(stdlib().fingerprint)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == source.fingerprint


def test_last_tenth_of_the_text_validates(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 500)
    (tmp_path / "b.md").write_text("b" * 500)
    (tmp_path / "c.py").write_text("not text by its name")
    source = text_files(str(tmp_path))
    assert source.train == ["a" * 500, "b" * 400]
    assert source.validation == ["b" * 100]
    glob = text_files(str(tmp_path / "*.txt"))
    assert (glob.train, glob.validation) == (["a" * 450], ["a" * 50])


def test_fingerprint_sees_contents_and_split(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    first = text_files(str(path)).fingerprint
    assert text_files(str(path)).fingerprint == first
    path.write_text("x" * 101)
    assert text_files(str(path)).fingerprint != first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\xff", "byte 0xff at offset 4 is not UTF-8"),
        (b"ab\0c", "byte 0x00 at offset 2"),
        (b" \n", "is empty"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        text_files(str(path))


def test_paths_that_lead_nowhere(tmp_path, small):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"there are no files ending in .txt or .md"):
        find_text_files(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="there is no file or folder of that name"):
        find_text_files(str(tmp_path / "absent.txt"))
    with pytest.raises(InputError, match=r"data.path is not set"):
        find_text_files(None)
    small.data.source = "books"
    with pytest.raises(InputError, match="'books'; it can be stdlib, text_files or tokens"):
        load_source(small.data)
