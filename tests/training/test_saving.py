"""Checkpoints of a run, and resuming from them."""

import threading

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Manifest, checkpoints
from pipemesh.checkpoint.manifest import WEIGHTS_ONLY
from pipemesh.errors import CheckpointError, SaveError
from pipemesh.training import Batches
from pipemesh.training.saving import Saving


@pytest.fixture
def state():
    return {"global_step": tf.Variable(0), "w/var": tf.Variable([0.0, 0.0])}


def train(state, folder, steps, notes=None):
    """Three numbers a step; a checkpoint each."""
    saving = Saving(str(folder), state)
    batches = Batches(tf.data.Dataset.range(1000))
    saving.follow(batches)
    for step in steps:
        state["w/var"].assign_add([1.0, float(batches.next())])
        state["global_step"].assign(step)
        saving.save(step, (notes or {}).get(step, {"lr": 1, "skip": step}), lambda: None)
    return saving


def damage(folder, step, place=2):
    path = folder / f"ckpt-{step}.data-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# The position in the data is written last.
@pytest.mark.parametrize("place", [2, -9])
def test_the_checkpoint_before_serves_if_settings_agree(state, tmp_path, capsys, place):
    train(state, tmp_path, [1, 2])
    damage(tmp_path, 2, place)
    assert Saving(str(tmp_path), state).restore(str(tmp_path / "ckpt-2")).endswith("ckpt-1")
    assert int(state["global_step"]) == 1
    assert state["w/var"].numpy().tolist() == [1.0, 0.0]
    assert f"going back to {tmp_path}/ckpt-1" in capsys.readouterr().err
    batches = Batches(tf.data.Dataset.range(1000))
    batches.go_to(str(tmp_path / "ckpt-1"))
    assert int(batches.next()) == 1


def test_one_of_other_settings_is_not_taken_under_these(state, tmp_path):
    saving = train(state, tmp_path, [1, 2], {1: {"lr": 2}, 2: {"lr": 1}})
    damage(tmp_path, 2)
    with pytest.raises(CheckpointError, match="ckpt-1 was made with other settings, so run the"):
        saving.restore(str(tmp_path / "ckpt-2"))
    assert saving.restore(str(tmp_path / "ckpt-1")).endswith("ckpt-1")


def test_unknown_tensors_in_a_checkpoint_are_an_error(state, tmp_path):
    train(state, tmp_path, [1])
    less = {"global_step": state["global_step"]}
    with pytest.raises(CheckpointError, match="has 1 tensors that the model has not, such as 'w/v"):
        Saving(str(tmp_path), less).restore(str(tmp_path / "ckpt-1"))


def test_weights_alone_are_restored_alone(state, tmp_path):
    """Weights of another program come without the optimizer's state."""
    weights = {name: state[name] for name in ("global_step", "w/var")}
    train(weights, tmp_path, [4], {4: {WEIGHTS_ONLY: True}})
    state["w/var/Adam"] = tf.Variable([3.0, 3.0])
    state["w/var"].assign([9.0, 9.0])
    path = str(tmp_path / "ckpt-4")
    assert Saving(str(tmp_path), state, weights=weights).restore(path) == path
    assert (int(state["global_step"]), state["w/var"].numpy().tolist()) == (4, [1.0, 0.0])
    assert state["w/var/Adam"].numpy().tolist() == [3.0, 3.0]
    # A weight that is not there is missed all the same, and without the note so is the state.
    state["v/var"] = tf.Variable(0.0)
    with pytest.raises(CheckpointError, match="has no 'v/var'"):
        Saving(str(tmp_path), state, weights=[*weights, "v/var"]).restore(path)
    train(weights, tmp_path, [5])
    with pytest.raises(CheckpointError, match="has no 'w/var/Adam'"):
        Saving(str(tmp_path), state, weights=weights).restore(str(tmp_path / "ckpt-5"))


def test_it_is_saved_once_a_step_and_only_if_it_is_good(state, tmp_path):
    saving = train(state, tmp_path, [1])
    checked = []

    def check():
        checked.append(1)

    for _ in range(2):
        assert saving.save(2, {}, check) == str(tmp_path / "ckpt-2")
    assert len(checked) == 1

    def bad():
        saving.give_up()
        raise ArithmeticError

    # Begun, and not good.
    saving.begin(3, {})
    with pytest.raises(ArithmeticError):
        saving.save(3, {}, bad)
    assert saving.newest == str(tmp_path / "ckpt-2")
    # Begun, and good.
    saving.begin(4, {"n": 1})
    assert saving.save(4, {"n": 2}, check) == saving.newest
    assert Manifest.read(str(saving.newest)).note == {"n": 1}


@pytest.fixture
def full_disk(monkeypatch):
    """Makes the disk full; undo the patch for more room."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(checkpoints.Manifest, "write", full)


def test_a_failed_write_does_not_lose_the_next_checkpoint(state, tmp_path, monkeypatch, full_disk):
    saving = train(state, tmp_path, [1])
    full_disk()
    saving.begin(2, {})
    saving.confirm()
    # It is told when the next one is due, which is tried all the same.
    with pytest.raises(SaveError, match="ckpt-2 cannot be written"):
        saving.begin(3, {})
    monkeypatch.undo()
    saving.confirm()
    saving.give_up()
    assert saving.newest in (str(tmp_path / "ckpt-3"), str(tmp_path / "ckpt-1"))
    assert not list(tmp_path.glob("*ckpt-2*"))
    # So is the last one.
    full_disk()
    saving.begin(4, {})
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    monkeypatch.undo()
    assert saving.save(5, {}, lambda: None) == str(tmp_path / "ckpt-5") == saving.newest


def test_a_save_begun_before_a_data_error_is_dropped(state, tmp_path):
    """Its iterator has read the failure ahead: who went on from it failed at once, for ever."""
    saving = train(state, tmp_path, [1])
    saving.begin(2, {"place": "failed"})
    saving.follow(Batches(tf.data.Dataset.range(1000)))
    assert saving.save(2, {"place": "good"}, lambda: None) == str(tmp_path / "ckpt-2")
    assert Manifest.read(str(tmp_path / "ckpt-2")).note == {"place": "good"}
