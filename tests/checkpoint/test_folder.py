"""Folders of checkpoints, and locks on them."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from pipemesh.checkpoint import Folder, folder, newest, newest_whole
from pipemesh.checkpoint.folder import check_held, held_by_none, hold_newest
from pipemesh.checkpoint.manifest import BASE, WEIGHTS_ONLY
from pipemesh.errors import CheckpointError, SaveError
from tests.checkpoint.made import DATA, make


def names(tmp_path):
    return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))


def test_only_leftovers_are_removed(tmp_path):
    stays = ["ckpt-3.index", f"ckpt-3.{DATA}", "ckpt-3.manifest", "ckpt-100.pt", ".ckpt-notes.2"]
    stays.append(f"damaged-ckpt-6.{DATA}")
    goes = [f"ckpt-6_temp/ckpt-6.{DATA}", "ckpt-6.manifest", f"ckpt-6.{DATA}", ".checkpoint.4711"]
    for name in [*stays, *goes]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    folder.remove_leftovers(str(tmp_path))
    assert names(tmp_path) == sorted(stays)
    assert not (tmp_path / "ckpt-6_temp").exists()
    assert newest(str(tmp_path)) == str(tmp_path / "ckpt-3")


def test_a_base_is_never_removed(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step, note={} if step == 1 else {BASE: {"name": "ckpt-1", "index": ""}})
    gone = folder.to_let_go(str(tmp_path), keep=1, keep_best=0)
    assert [os.path.basename(path) for path in gone] == ["ckpt-2"]
    os.remove(tmp_path / "ckpt-1.index")
    folder.remove_leftovers(str(tmp_path))
    assert (tmp_path / f"ckpt-1.{DATA}").exists() and (tmp_path / "ckpt-1.manifest").exists()


def test_a_lost_run_is_found_by_its_beginning(tmp_path):
    first = str(tmp_path / "ckpt-1")
    make(tmp_path, 1, note={WEIGHTS_ONLY: True})
    assert folder.lost_run(first, has_changed=False) is None
    make(tmp_path, 2)
    folder.set_aside(str(tmp_path / "ckpt-2"))
    assert folder.lost_run(first, has_changed=False) == str(tmp_path / "damaged-ckpt-2")
    # Adapters may begin on any checkpoint, and checkpoints of other runs go on by their own flags.
    make(tmp_path, 1)
    assert folder.lost_run(first, has_changed=True) is None
    make(tmp_path, 3, note={BASE: {"name": "ckpt-1", "index": ""}})
    folder.set_aside(str(tmp_path / "ckpt-3"))
    assert folder.lost_run(first, has_changed=True) == str(tmp_path / "damaged-ckpt-3")


@pytest.mark.parametrize("end", ["truncated", "missing"])
def test_flags_of_a_lost_run_that_cannot_be_read(tmp_path, end):
    """Another run went on in its place, and trained all weights."""
    first, note = str(tmp_path / "ckpt-1"), f"{make(tmp_path, 2)}.manifest"
    os.truncate(note, 5) if end == "truncated" else os.remove(note)
    for has_changed, noted in ((False, {WEIGHTS_ONLY: True}), (True, {})):
        make(tmp_path, 1, note=noted)
        with pytest.raises(CheckpointError, match=r"ckpt-2 had the flags .* to begin anew with ck"):
            folder.lost_run(first, has_changed)
    assert folder.lost_run(first, has_changed=False) is None


def test_a_damaged_checkpoint_is_set_aside(tmp_path, capsys):
    paths = [make(tmp_path, step) for step in (3, 20, 100)]
    os.truncate(f"{paths[2]}.{DATA}", 1)
    os.unlink(f"{paths[1]}.{DATA}")
    found = newest_whole(str(tmp_path))
    assert found is not None and found[0] == paths[0]
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"{paths[2]} is damaged: {paths[2]}.{DATA} has 1 bytes of 3; ")
    assert told[0].endswith(f"; set aside as damaged-ckpt-100, going back to {paths[1]}")
    assert told[1].endswith(f"; set aside as damaged-ckpt-20, going back to {paths[0]}")
    assert {"damaged-ckpt-100.index", f"damaged-ckpt-100.{DATA}"} <= set(names(tmp_path))
    assert newest_whole(str(tmp_path)) == found, "and nothing is said a second time"
    assert not capsys.readouterr().err


def test_a_run_never_restarts_over_damaged_checkpoints(tmp_path):
    assert newest_whole(str(tmp_path)) is None
    os.truncate(f"{make(tmp_path, 3)}.index", 0)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"only damaged ones \(damaged-ckpt-3\); put"):
            newest_whole(str(tmp_path))


def test_a_lost_index_is_damage_not_an_unfinished_write(tmp_path, capsys):
    """Its weights were removed as a leftover, and training began anew in their place."""
    paths = [make(tmp_path, step) for step in (3, 6)]
    os.unlink(f"{paths[1]}.index")
    folder.remove_leftovers(str(tmp_path))
    assert capsys.readouterr().err == (
        f"{paths[1]} is damaged: {paths[1]}.index is missing; set aside as damaged-ckpt-6, going "
        f"back to {paths[0]}\n"
    )
    assert {f"damaged-ckpt-6.{DATA}", "damaged-ckpt-6.manifest"} <= set(names(tmp_path))
    os.unlink(f"{paths[0]}.index")
    folder.remove_leftovers(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"\(damaged-ckpt-3, damaged-ckpt-6\); put a copy"):
        newest_whole(str(tmp_path))


def test_parts_of_an_older_checkpoint_are_removed(tmp_path, capsys):
    paths = [make(tmp_path, step) for step in (3, 6)]
    os.unlink(f"{paths[0]}.index")
    folder.remove_leftovers(str(tmp_path))
    assert names(tmp_path) == sorted(f"ckpt-6.{end}" for end in ("index", "manifest", DATA))
    assert not capsys.readouterr().err


def test_folders_in_place_of_files_are_handled(tmp_path, capsys):
    """A checkpoint that was set aside once blocked the next one for ever."""
    path = make(tmp_path, 3)
    for end in (DATA, "index", "manifest"):
        make(tmp_path, 6)
        os.unlink(tmp_path / f"ckpt-6.{end}")
        (tmp_path / f"ckpt-6.{end}" / "inside").mkdir(parents=True)
        found = newest_whole(str(tmp_path))
        assert found is not None and found[0] == path
        assert f"ckpt-6.{end} is a folder; set aside" in capsys.readouterr().err
    (tmp_path / f"ckpt-3.{DATA}").unlink()
    (tmp_path / f"ckpt-3.{DATA}" / "inside").mkdir(parents=True)
    folder.remove(path)
    assert not [name for name in names(tmp_path) if name.startswith("ckpt-3")]


def test_a_failed_publish_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "ckpt-6_temp").mkdir()
    temporary = make(tmp_path / "ckpt-6_temp", 6)
    real = os.replace

    def replace(old, new):
        if str(new).endswith(".index"):
            raise OSError(28, "No space left on device")
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        folder.publish(temporary, str(tmp_path / "ckpt-6"))
    assert names(tmp_path) == ["ckpt-6_temp/ckpt-6.index"]


def test_another_programs_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "ckpt-3.index").touch()
    with pytest.raises(CheckpointError, match="of another program"):
        newest_whole(str(tmp_path))
    assert names(tmp_path) == ["ckpt-3.index"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, score in ((1, 0.5), (2, 0.1), (3, None), (4, 0.1), (5, 0.3), (6, 9.0)):
        make(tmp_path, step, score)

    def kept(*counts):
        gone = {os.path.basename(path) for path in folder.to_let_go(str(tmp_path), *counts)}
        return [step for step in range(1, 7) if f"ckpt-{step}" not in gone]

    assert kept(2, 0) == [5, 6]
    # Of two that are as good, the older one.
    assert kept(1, 1) == [2, 6]
    assert kept(1, 3) == [2, 4, 5, 6]
    assert kept(9, 0) == [1, 2, 3, 4, 5, 6]
    # Nor does a damaged manifest end anything.
    os.truncate(tmp_path / "ckpt-2.manifest", 5)
    assert kept(1, 1) == [4, 6]


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
    with Folder(str(tmp_path)), held_by_none(make(tmp_path, 3)) as is_free:
        assert is_free
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
            folder._held[0].check()
        check_held(str(path))
        with pytest.raises(CheckpointError, match="is in use"):
            Folder(str(path)).__enter__()


def test_the_newest_is_held_while_others_are_removed(tmp_path, monkeypatch):
    """`evaluate` beside a training that saves often found its checkpoint rotated away."""
    paths, real = [make(tmp_path, step) for step in (3, 6)], folder.newest
    gone = []

    def newest(folder):
        path = real(folder)
        if not gone:
            gone.append(path)
            os.unlink(f"{path}.index")
        return path

    monkeypatch.setattr(folder, "newest", newest)
    assert hold_newest(str(tmp_path)) == paths[0]
    for path, wanted in ((paths[0], False), (make(tmp_path, 9), True)):
        with held_by_none(path) as is_free:
            assert is_free == wanted


def test_a_newest_that_cannot_be_opened_is_returned(tmp_path):
    """A link to nothing was looked for without end."""
    os.symlink(tmp_path / "gone", tmp_path / "ckpt-5.index")
    assert hold_newest(str(tmp_path)) in (None, str(tmp_path / "ckpt-5"))


def test_a_run_that_is_refused_leaves_no_folder_behind(tmp_path):
    with pytest.raises(ValueError), Folder(f"{tmp_path}/runs/model/"):
        raise ValueError
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError), Folder(str(tmp_path / "runs" / "model")):
        (tmp_path / "runs" / "model" / "kept").touch()
        raise ValueError
    assert (tmp_path / "runs" / "model" / "kept").exists()
