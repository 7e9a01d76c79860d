"""A checkpoint written tensor by tensor."""

import os

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Manifest, restore, writer
from pipemesh.errors import SaveError


def test_it_is_written_in_parts_and_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BYTES_AT_ONCE", 100)
    held = []

    def get(n):
        held.append(n)
        return tf.fill([10], float(n))

    path = str(tmp_path / "made" / "ckpt-8")
    tensors = [(f"w{n}", lambda n=n: get(n)) for n in range(7)]
    writer.write(path, tensors, step=8, note={"by": "me"})
    assert held == list(range(7)), "in order, each once"
    names = sorted(os.listdir(tmp_path / "made"))
    assert [name for name in names if ".data" not in name] == ["ckpt-8.index", "ckpt-8.manifest"]
    assert len(names) == 5, "three parts"
    manifest = Manifest.read(path)
    manifest.check(path)
    assert (manifest.step, manifest.note, len(manifest.sizes)) == (8, {"by": "me"}, 3)
    variables = {f"w{n}": tf.Variable(tf.zeros([10])) for n in range(7)}
    assert restore(path, variables) == []
    assert [v.numpy()[3] for v in variables.values()] == list(range(7))


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    def fails():
        raise OSError(28, "No space left on device")

    path = str(tmp_path / "ckpt-8")
    with pytest.raises(SaveError, match=r"ckpt-8 cannot be written \(.*No space left"):
        writer.write(path, [("a", lambda: tf.zeros([2])), ("b", fails)], step=8, note={})
    assert not os.listdir(tmp_path)


def test_a_folder_of_such_a_name_is_somebody_elses(tmp_path):
    (tmp_path / "ckpt-8_temp").mkdir()
    (tmp_path / "ckpt-8_temp" / "mine").touch()
    writer.write(str(tmp_path / "ckpt-8"), [("a", lambda: tf.zeros([2]))], step=8, note={})
    assert (tmp_path / "ckpt-8_temp" / "mine").exists()
    assert sum(1 for path in tmp_path.iterdir() if path.is_dir()) == 1
