"""A log directory has one owner, who cleans up first."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from models.one_billion_word.about import CheckpointError
from models.one_billion_word.logdir import Logdir, latest_checkpoint, remove_leftovers

HOLD = """
import sys, time
from models.one_billion_word.logdir import Logdir
with Logdir(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_training_is_refused_until_the_first_is_gone_even_by_a_kill(tmp_path):
    path = str(tmp_path / "made" / "on the way")
    process = hold(path)
    try:
        with pytest.raises(CheckpointError, match="is in use: another training writes to it"):
            Logdir(path).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Logdir(path):
            assert os.listdir(path) == [], "nothing lies about that could be in the way"
        with Logdir(path):
            assert True, "it was given back"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_where_the_file_system_knows_no_locks_it_is_said(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Logdir(str(tmp_path)):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        Logdir(str(tmp_path / "file"))

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(CheckpointError, match=r"cannot be written to \(Read-only file system\)"):
        Logdir(str(tmp_path))


def test_leftovers_go_and_everything_else_stays(tmp_path):
    stays = [
        "ckpt-3.index",
        "ckpt-3.data-00000-of-00001",
        "ckpt-3.about",
        "ckpt-100.pt",
        "checkpoint",
        ".ckpt-notes.2",
        "vocabulary/vocab-400-0-1.model",
    ]
    goes = [
        "ckpt-6_temp/part-00000-of-00001.data-00000-of-00001",
        "ckpt-6.about",
        "ckpt-6.data-00000-of-00001",
        ".ckpt-6.about.4711",
        "checkpoint.tmp0123456789abcdef0123456789abcdef",
        "vocabulary/.vocab-400-0-1.model.4711",
    ]
    for name in [*stays, *goes]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    remove_leftovers(str(tmp_path))
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(stays)
    assert not (tmp_path / "ckpt-6_temp").exists()
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-3")
