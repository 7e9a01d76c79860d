"""Copies of what TensorFlow cannot read: made once, whole or not at all, and looked at."""

import gzip
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from backports import zstd

from models.one_billion_word import text_copy, text_file
from models.one_billion_word.corpus import CorpusError, TextFiles

TEXT = b"".join(b"sentence %d\n\n" % number for number in range(9000))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "pipemesh" / "text"


def write(path, content):
    path.write_bytes(content)
    return str(path)


def test_plain_text_is_read_where_it_is(cache, tmp_path):
    path = write(tmp_path / "text", TEXT)
    assert text_copy.readable(path) == path
    assert not cache.exists()


def test_a_packed_text_has_one_copy_however_it_is_packed_and_wherever_it_is(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    paths = [
        write(tmp_path / "a.zst", zstd.compress(TEXT)),
        write(tmp_path / "elsewhere" / "b", zstd.compress(TEXT[:99]) + zstd.compress(TEXT[99:])),
        write(tmp_path / "c.gz", gzip.compress(b"") + gzip.compress(TEXT) + bytes(100)),
    ]
    copies = {text_copy.readable(path) for path in paths}
    (copy,) = copies
    assert os.listdir(cache) == [os.path.basename(copy)]
    assert pathlib.Path(copy).read_bytes() == TEXT, "byte for byte, so that places in it agree"
    written = os.stat(copy).st_mtime_ns
    assert text_copy.readable(paths[0]) == copy
    assert os.stat(copy).st_mtime_ns == written


@pytest.mark.parametrize("pack", [bytes, zstd.compress])
def test_long_lines_are_cut_and_floods_of_empty_lines_thinned(cache, tmp_path, pack):
    long = b"ab " * 99_999
    flood = b"\n" * (1 << 22)
    for name, content, lines in (
        ("long", b"a\n\n" + long + b"\nb", None),
        ("flood", b"a\n" + flood + b"b\r\n", [b"a", b"b\r"]),
    ):
        copy = text_copy.readable(write(tmp_path / name, pack(content)))
        assert copy.startswith(str(cache))
        got = pathlib.Path(copy).read_bytes().split(b"\n")
        assert got.pop() == b"" and all(got)
        assert got == (lines or [b"a", *got[1:-1], b"b"])
        assert max(map(len, got)) <= text_file.LONGEST_LINE
        assert b" ".join(got[1:-1]) == (long if lines is None else b"")
        assert list(TextFiles((str(tmp_path / name),))) == list(TextFiles((copy,)))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_copy_is_made_again(cache, tmp_path, damage):
    path = write(tmp_path / "a.zst", zstd.compress(TEXT))
    copy = pathlib.Path(text_copy.readable(path))
    bad = {"cut": TEXT[:-1], "flipped": TEXT[:-1] + b"?", "empty": b""}[damage]
    copy.write_bytes(bad)
    assert text_copy.readable(path) == str(copy)
    assert copy.read_bytes() == TEXT


def test_what_was_not_finished_is_removed_and_what_is_being_written_is_not(cache, tmp_path):
    path = write(tmp_path / "a.zst", zstd.compress(TEXT))
    cache.mkdir(parents=True)
    write(cache / ".killed.part", b"half")
    others = write(cache / "what is not ours", b"")
    with text_copy._locked(str(cache / ".writing.part")) as file:
        file.write(b"half")
        text_copy.readable(path)
        assert sorted(os.listdir(cache))[0] == ".writing.part"
        assert len(os.listdir(cache)) == 3 and os.path.exists(others)
    assert len(os.listdir(cache)) == 2


def test_of_many_at_once_one_writes(cache, tmp_path, monkeypatch):
    paths = [write(tmp_path / f"{number}.zst", zstd.compress(TEXT)) for number in range(16)]
    written = []
    real = text_copy._write

    def counted(*arguments):
        written.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(text_copy, "_write", counted)
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(text_copy.readable, paths))
    assert len(copies) == len(written) == 1
    assert os.listdir(cache) == [os.path.basename(*copies)]


def test_a_folder_that_cannot_hold_it_is_told_in_a_line(tmp_path, monkeypatch):
    path = write(tmp_path / "a.zst", zstd.compress(TEXT))
    monkeypatch.setenv("XDG_CACHE_HOME", write(tmp_path / "file", b""))
    match = (
        r"a.zst' has to be copied to be read, .* which fails in '.*/file/pipemesh/text' \(Not a "
    )
    with pytest.raises(CorpusError, match=match + r".*\); make room, or .* XDG_CACHE_HOME$"):
        TextFiles((path,)).digest()


# A limit on the size of files stands for a full disk.
FULL = """
import resource, signal, sys
from models.one_billion_word import text_copy
from models.one_billion_word.corpus import CorpusError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    text_copy.readable(sys.argv[1])
except CorpusError as error:
    print(error)
"""


def test_a_full_disk_is_told_in_a_line_and_nothing_is_left(cache, tmp_path):
    path = write(tmp_path / "a.zst", zstd.compress(TEXT))
    ran = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True
    )
    assert "has to be copied to be read, 1" in ran.stdout and "(File too large)" in ran.stdout
    assert len(ran.stdout.splitlines()) == 1
    assert os.listdir(cache) == []


# Killed at the worst moment, after all is written.
KILLED = """
import os, signal, sys
from models.one_billion_word import text_copy
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
text_copy.readable(sys.argv[1])
"""


def test_a_kill_leaves_nothing_that_is_taken_for_a_copy(cache, tmp_path):
    path = write(tmp_path / "a.zst", zstd.compress(TEXT))
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -9
    (left,) = os.listdir(cache)
    assert left.endswith(".part")
    copy = text_copy.readable(path)
    assert os.listdir(cache) == [os.path.basename(copy)]


def test_text_that_changes_while_it_is_copied_is_told(cache, tmp_path, monkeypatch):
    path = write(tmp_path / "a.zst", zstd.compress(TEXT))
    real = text_file.blocks

    def blocks(read):
        write(tmp_path / "a.zst", zstd.compress(b"other"))
        return real(read)

    text_file.scan(path)
    monkeypatch.setattr(text_file, "blocks", blocks)
    with pytest.raises(CorpusError, match=r"a\.zst' changed while it was read; run again"):
        text_copy.readable(path)
    assert os.listdir(cache) == []
