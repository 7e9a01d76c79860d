"""Files that are whole or absent, and paths that TensorFlow can open."""

import os

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Checkpoints, Folder, contents, newest_whole, restore
from pipemesh.checkpoint.conversion import write
from pipemesh.checkpoint.files import remove_unfinished, write_whole
from pipemesh.errors import CheckpointError, DamagedError


def test_a_failed_rename_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    (tmp_path / "note").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(str(tmp_path / "note"), b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"note": b"old"}


def test_leftovers_of_a_kill_are_removed_other_files_stay(tmp_path):
    stays = ["vocab-1.model", ".vocab-1.model.txt", ".other.4711", "vocab-2.model.4711"]
    for name in [*stays, ".vocab-1.model.4711"]:
        (tmp_path / name).touch()
    remove_unfinished(str(tmp_path), "vocab-*.model")
    assert sorted(os.listdir(tmp_path)) == sorted(stays)
    remove_unfinished(str(tmp_path / "no such folder"), "*")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    """`error: [Errno 28] No space left on device` was all that was said."""
    (tmp_path / f".note.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*/note'") as caught:
        write_whole(str(tmp_path / "note"), b"new")
    assert caught.value.filename == str(tmp_path / "note")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["lr[0.1]", "b\\s", "[", "a]", "*?", "end\\"])
def test_any_log_directory_is_read_as_it_was_written(tmp_path, monkeypatch, name):
    """All of them trained and saved; of most, every checkpoint was then taken for damaged."""
    folder, w = str(tmp_path / name), tf.Variable([1.0, 2.0])
    for given in (folder, name):
        monkeypatch.chdir(tmp_path)
        with Folder(given):
            path = Checkpoints(given, {"w": w}).save(3, {})
            found = newest_whole(given)
            assert found is not None and found[0] == path
            other = tf.Variable([0.0, 0.0])
            assert restore(path, {"w": other}) == [] and other.numpy().tolist() == [1.0, 2.0]
            assert contents(path)[0] == {"w": [2]}
    with open(f"{path}.data-00000-of-00001", "r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DamagedError) as caught:
        restore(path, {"w": w})
    assert caught.value.what.count(path) and "/proc/" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (os.fsdecode(b"by\xffte"), "is not UTF-8, and TensorFlow opens only UTF-8 paths"),
        ("nul\0", "has a NUL character"),
    ],
)
def test_paths_that_tensorflow_cannot_open_are_refused(tmp_path, name, told):
    folder = str(tmp_path / name)
    for use in (
        lambda: Folder(folder),
        lambda: contents(f"{folder}/ckpt-3"),
        lambda: write(f"{folder}/ckpt-3", [], step=3, note={}),
    ):
        with pytest.raises(CheckpointError, match=told) as caught:
            use()
        assert not isinstance(caught.value, DamagedError)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_itself_has_no_name_of_a_pattern(tmp_path):
    with pytest.raises(CheckpointError, match=r"with \[ or \\ in its own name"):
        write(str(tmp_path / "lr[0.1]"), [], step=3, note={})
    assert os.listdir(tmp_path) == []
