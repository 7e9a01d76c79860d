"""A folder has one owner, who cleans up first."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from pipemesh.checkpoint import Folder, lock
from pipemesh.checkpoint.lock import check_held, held_by_none, hold_newest
from pipemesh.errors import CheckpointError, SaveError
from tests.checkpoint.made import make

HOLD = """
import sys, time
from pipemesh.checkpoint import Folder
with Folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    path = str(tmp_path / "made" / "on the way")
    process = hold(path)
    try:
        with pytest.raises(CheckpointError, match="is in use: another run writes to it"):
            Folder(path).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Folder(path):
            assert os.listdir(path) == [], "nothing lies about that could be in the way"
        with Folder(path):
            assert True, "it was given back"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_missing_locks_are_reported(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Folder(str(tmp_path)):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        Folder(str(tmp_path / "file"))
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="is a link to nothing; give a folder"):
        Folder(str(tmp_path / "link"))

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(CheckpointError, match=r"cannot be written to \(Read-only file system\)"):
        Folder(str(tmp_path))


def test_a_new_folder_in_place_of_the_held_one_is_locked_too(tmp_path):
    """Two trainings wrote into one folder, which was removed after the first had begun."""
    path = tmp_path / "run"
    with Folder(str(path)):
        check_held(str(path))
        path.rmdir()
        with pytest.raises(FileNotFoundError):
            check_held(str(path))
        with Folder(str(path)), pytest.raises(SaveError, match="another run writes to a new"):
            lock._held[0].check()
        check_held(str(path))
        with pytest.raises(CheckpointError, match="is in use"):
            Folder(str(path)).__enter__()


def test_the_newest_is_held_while_others_are_removed(tmp_path, monkeypatch):
    """`evaluate` beside a training that saves often found its checkpoint rotated away."""
    paths, real = [make(tmp_path, step) for step in (3, 6)], lock.newest
    gone = []

    def newest(folder):
        path = real(folder)
        if not gone:
            gone.append(path)
            os.unlink(f"{path}.index")
        return path

    monkeypatch.setattr(lock, "newest", newest)
    assert hold_newest(str(tmp_path)) == paths[0]
    for path, wanted in ((paths[0], False), (make(tmp_path, 9), True)):
        with held_by_none(path) as is_free:
            assert is_free == wanted


def test_a_newest_that_cannot_be_opened_is_returned(tmp_path):
    """A link to nothing was looked for without end."""
    os.symlink(tmp_path / "gone", tmp_path / "ckpt-5.index")
    assert hold_newest(str(tmp_path)) in (None, str(tmp_path / "ckpt-5"))
