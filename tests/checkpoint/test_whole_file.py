"""Files that are whole or not there."""

import os

import pytest

from pipemesh.checkpoint.whole_file import remove_unfinished, write_whole


def test_what_cannot_be_renamed_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    (tmp_path / "note").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(str(tmp_path / "note"), b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"note": b"old"}


def test_what_a_kill_has_left_goes_and_files_of_others_stay(tmp_path):
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
