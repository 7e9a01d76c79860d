"""Checkpoints written anew."""

import os

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Checkpoints, Manifest, conversion, convert, restore
from pipemesh.checkpoint.conversion import names_of
from pipemesh.errors import CheckpointError, SaveError


def mine(tmp_path, **more):
    """A checkpoint of a training: what another program does not save is there, too."""
    iterator = iter(tf.data.Dataset.range(9))
    next(iterator)
    state = {
        "global_step": tf.Variable(1, dtype=tf.int64),
        "skipped_steps": tf.Variable(7, dtype=tf.int64),
        "w": tf.Variable([0.0, 0.0], dtype=tf.bfloat16),
        "data/batches": iterator,
    }
    return Checkpoints(str(tmp_path), state | more).save(1, {"by": "me"})


def theirs(tmp_path, **state):
    """One of another program."""
    state = {"w": [1.0, 2.0], "counter": 5, **state}
    variables = {name: tf.Variable(value) for name, value in state.items() if value is not None}
    variables["global_step"] = tf.Variable(300, dtype=tf.int64)
    return tf.compat.v1.train.Saver(variables).save(None, str(tmp_path / "theirs"))


def converted(path, like=None):
    to = f"{path}-converted"
    return to, convert(path, to, {name: name for name in names_of(path)}, like=like)


def test_another_programs_checkpoint_becomes_like_a_runs(tmp_path):
    path, like = theirs(tmp_path), mine(tmp_path)
    to, told = converted(path, like)
    assert told == (
        f"{to}: 2 tensors of {path}, data/batches, skipped_steps of {like}; left out: counter"
    )
    manifest = Manifest.read(to)
    assert (manifest.step, manifest.note) == (300, {"by": "me"})
    step, skipped = (tf.Variable(0, dtype=tf.int64) for _ in range(2))
    w, iterator = tf.Variable([0.0, 0.0], dtype=tf.bfloat16), iter(tf.data.Dataset.range(9))
    state = {"global_step": step, "skipped_steps": skipped, "w": w, "data/batches": iterator}
    assert restore(to, state) == []
    assert (int(step), int(skipped), w.numpy().tolist()) == (300, 7, [1.0, 2.0])
    assert int(next(iterator)) == 1, "where the training was, which the other does not know"
    assert tf.train.load_checkpoint(to).get_variable_to_dtype_map()["w"] == tf.bfloat16


def test_the_step_of_another_programs_checkpoint_is_noted(tmp_path):
    """It was noted as 0."""
    to, _ = converted(theirs(tmp_path))
    assert Manifest.read(to).step == 300


@pytest.mark.parametrize(
    ("state", "more", "told"),
    [
        ({"w": None, "v": [1.0, 2.0]}, {}, "only .*ckpt-1 has 'w'; the nearest name in the other"),
        ({"w/Adam": [1.0, 2.0]}, {}, "only .*theirs has 'w/Adam'; the nearest .* other is 'w'"),
        ({"w": [1.0]}, {}, r"'w' of .*theirs is float32\[1\], but 'w' of .* is bfloat16\[2\]"),
        ({"w": [1, 2]}, {}, r"'w' of .*theirs is int32\[2\], but 'w' of .* is bfloat16\[2\]"),
        ({}, {"v": tf.Variable([1.0])}, "only .*ckpt-1 has 'v'"),
    ],
)
def test_a_missing_or_different_weight_is_an_error(tmp_path, state, more, told):
    """Nobody trains on with what a name that was not found has left as it was."""
    path, like = theirs(tmp_path, **state), mine(tmp_path, **more)
    with pytest.raises(CheckpointError, match=told):
        converted(path, like)
    assert not list(tmp_path.glob("*converted*"))


def test_a_folder_gets_a_list_of_its_first_checkpoint_alone(tmp_path):
    """The list of a folder that has one is somebody else's."""
    like = mine(tmp_path)
    to, _ = converted(like)
    assert tf.train.latest_checkpoint(str(tmp_path)) == like
    names = {name: name for name in names_of(like)}
    new = str(tmp_path / "new" / "ckpt-00000001")
    convert(to, new, names)
    assert tf.train.latest_checkpoint(str(tmp_path / "new")) == new


def test_the_name_of_a_new_one_says_its_step(tmp_path):
    path = theirs(tmp_path)
    with pytest.raises(CheckpointError, match=r"is of step 300; give a path that ends in ckpt-300"):
        convert(path, str(tmp_path / "ckpt-5"), {name: name for name in names_of(path)})


def test_a_checkpoint_written_in_parts_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "_BYTES_AT_ONCE", 100)
    held = []

    def get(n):
        held.append(n)
        return tf.fill([10], float(n))

    path = str(tmp_path / "made" / "ckpt-8")
    tensors = [(f"w{n}", lambda n=n: get(n)) for n in range(7)]
    conversion.write(path, tensors, step=8, note={"by": "me"})
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


def test_a_failed_conversion_leaves_nothing(tmp_path):
    def fails():
        raise OSError(28, "No space left on device")

    path = str(tmp_path / "ckpt-8")
    with pytest.raises(SaveError, match=r"ckpt-8 cannot be written \(.*No space left"):
        conversion.write(path, [("a", lambda: tf.zeros([2])), ("b", fails)], step=8, note={})
    assert not os.listdir(tmp_path)


def test_a_temporary_folder_of_another_program_stays(tmp_path):
    (tmp_path / "ckpt-8_temp").mkdir()
    (tmp_path / "ckpt-8_temp" / "mine").touch()
    conversion.write(str(tmp_path / "ckpt-8"), [("a", lambda: tf.zeros([2]))], step=8, note={})
    assert (tmp_path / "ckpt-8_temp" / "mine").exists()
    assert sum(1 for path in tmp_path.iterdir() if path.is_dir()) == 1
