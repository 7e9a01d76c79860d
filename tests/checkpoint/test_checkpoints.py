"""Checkpoints: written beside training, whole or not at all."""

import contextlib
import os
import pathlib
import subprocess
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.checkpoint import (
    Checkpoints,
    Folder,
    Manifest,
    checkpoints,
    newest,
    newest_whole,
    restore,
)
from pipemesh.checkpoint.folder import steps_of
from pipemesh.errors import CheckpointError, SaveError
from tests.warm import warm


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    """The values are those of the instant at which saving began, not of when they were written."""
    go = threading.Event()
    real = tf.raw_ops.SaveV2

    def slow(**arguments):
        assert go.wait(60)
        return real(**arguments)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", slow)
    w = tf.Variable(tf.zeros([1000]))
    saver = Checkpoints(str(tmp_path), {"w": w})
    path = saver.begin(1, {})
    for _ in range(3):
        w.assign_add(tf.ones([1000]))
    saver.confirm()
    saver.poll()
    assert newest(str(tmp_path)) is None
    go.set()
    assert saver.wait() == path
    assert not tf.train.load_checkpoint(path).get_tensor("w").any()
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint",
        "ckpt-1.data-00000-of-00001",
        "ckpt-1.index",
        "ckpt-1.manifest",
    ]


def test_an_unconfirmed_checkpoint_does_not_count(tmp_path):
    w = tf.Variable(1.0)
    saver = Checkpoints(str(tmp_path), {"w": w})
    first = saver.save(1, {})
    saver.begin(2, {})
    assert saver.is_writing
    saver.abandon()
    # Too late.
    saver.confirm()
    assert saver.wait() == first
    saver.begin(3, {})
    # Nor does the next one take it along.
    saver.begin(4, {})
    saver.confirm()
    saver.wait()
    assert sorted(p.name for p in tmp_path.glob("*.index")) == ["ckpt-1.index", "ckpt-4.index"]
    assert not list(tmp_path.glob("*_temp"))


def test_the_newest_and_best_are_kept_and_listed(tmp_path):
    w = tf.Variable(0.0)
    saver = Checkpoints(str(tmp_path), {"w": w}, keep=2, keep_best=1)
    for step, score in enumerate([3.0, 1.0, 2.0, None, 4.0]):
        w.assign(float(step))
        saver.save(step, {"n": step}, score)
    left = sorted(p.name for p in tmp_path.glob("*.index"))
    assert left == ["ckpt-1.index", "ckpt-3.index", "ckpt-4.index"]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-4")
    assert Manifest.read(str(tmp_path / "ckpt-1")).note == {"n": 1}


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path):
    w = tf.Variable(1.0)
    saver = Checkpoints(str(tmp_path), {"w": w})
    saver.save(5, {})
    w.assign(2.0)
    path = saver.save(5, {})
    Manifest.read(path).check(path)
    assert tf.train.load_checkpoint(path).get_tensor("w") == 2.0


def test_a_failed_write_is_reported_once_and_leaves_nothing(tmp_path, monkeypatch):
    w = tf.Variable(1.0)
    saver = Checkpoints(str(tmp_path), {"w": w})
    first = saver.save(1, {})
    before = sorted(os.listdir(tmp_path))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.Manifest, "write", full)
    saver.begin(2, {})
    saver.confirm()
    with pytest.raises(SaveError, match=r"ckpt-2 cannot be written \(.*No space left on device\)"):
        while True:
            saver.poll()
            time.sleep(0.01)
    assert saver.wait() == first, "it is told once"
    assert sorted(os.listdir(tmp_path)) == before
    monkeypatch.undo()
    assert saver.save(3, {}) == str(tmp_path / "ckpt-3")


ENDLESS = """
import sys
import tensorflow as tf
from pipemesh.checkpoint import Checkpoints, Folder, newest_whole, restore
with Folder(sys.argv[1]):
    step, many = tf.Variable(0), [tf.Variable(tf.zeros([40_000])) for _ in range(30)]
    tracked = {"step": step} | {str(n): v for n, v in enumerate(many)}
    saver = Checkpoints(sys.argv[1], tracked, keep=2)
    found = newest_whole(sys.argv[1])
    if found:
        restore(found[0], tracked)
    print(step.numpy(), flush=True)
    while True:
        for v in (step, *many):
            v.assign_add(tf.ones_like(v))
        saver.confirm()
        if step % 3 == 0:
            saver.begin(int(step), {})
            print(int(step), flush=True)
"""


def wait_until_free(folder):
    """Waits until a killed process has released the lock on a folder."""
    while True:
        with contextlib.suppress(CheckpointError), Folder(str(folder)):
            return
        time.sleep(0.01)


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_last_whole_one(tmp_path):
    """Five kills while three of four milliseconds go into writing."""
    rng, last = np.random.default_rng(1), 0
    for _ in range(5):
        wait_until_free(tmp_path)
        process = subprocess.Popen(
            warm("-c", ENDLESS, str(tmp_path)), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        began = int(process.stdout.readline())
        assert began >= last, "nothing that was whole is lost"
        # When a checkpoint begins, the one before is whole; a busy machine takes its time.
        for _ in range(2):
            process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.2))
        process.kill()
        # Until the program itself has ended.
        process.communicate()
        found = newest_whole(str(tmp_path))
        last = found[1].step if found else 0
        if found:
            values = {str(n): tf.Variable(tf.zeros([40_000])) for n in range(30)}
            restore(found[0], values)
            assert all((v.numpy() == last).all() for v in values.values())
    assert last > 0
    assert not list(pathlib.Path(tmp_path).glob("damaged-*"))


def test_values_are_freed_after_writing_not_after_confirming(tmp_path, monkeypatch):
    """A thread keeps its arguments until it ends: every update meanwhile copied its variable."""
    taken = []
    real = checkpoints.Snapshot.of

    def noted(*what):
        snapshot = real(*what)
        taken.append(weakref.ref(snapshot))
        return snapshot

    monkeypatch.setattr(checkpoints.Snapshot, "of", noted)
    saver = Checkpoints(str(tmp_path), {"w": tf.Variable(1.0)})
    saver.begin(1, {})
    end = time.monotonic() + 30
    while taken[0]() is not None:
        assert time.monotonic() < end, "it is held"
        time.sleep(0.01)
    assert saver.is_writing
    saver.abandon()
    saver.wait()


def test_any_error_reaches_the_caller(tmp_path):
    saver = Checkpoints(str(tmp_path), {"w": tf.Variable(1.0)})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.save(1, {"note": {1, 2}})
    assert not os.listdir(tmp_path)


def test_a_removed_folder_is_not_created_again(tmp_path):
    (tmp_path / "run").mkdir()
    saver = Checkpoints(str(tmp_path / "run"), {"w": tf.Variable(1.0)})
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(SaveError, match=r"ckpt-1 cannot be written \(.*No such file"):
        saver.save(1, {})
    assert os.listdir(tmp_path) == ["away"]


def test_an_unreadable_folder_keeps_the_known_newest(tmp_path, monkeypatch):
    """To say what is kept ended a training that could not be saved."""
    saver = Checkpoints(str(tmp_path), {"w": tf.Variable(1.0)})
    saver.save(1, {})
    path = saver.begin(2, {})
    saver.confirm()
    while saver.is_writing:
        time.sleep(0.01)

    def denied(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(SaveError, match=r"ckpt-3 cannot be written \(.*Permission denied\)"):
        saver.save(3, {})
    assert saver.newest == path


def test_a_folder_in_place_of_an_older_file_is_removed(tmp_path):
    """The new one was whole, and training ended with the error that it could not be written."""
    saver = Checkpoints(str(tmp_path), {"w": tf.Variable(1.0)}, keep=1)
    saver.save(1, {})
    (tmp_path / "ckpt-1.data-00000-of-00001").unlink()
    (tmp_path / "ckpt-1.data-00000-of-00001").mkdir()
    assert saver.save(2, {}) == str(tmp_path / "ckpt-2")
    assert not list(tmp_path.glob("ckpt-1*"))


def test_a_checkpoint_that_is_read_goes_only_afterwards(tmp_path, monkeypatch):
    saver = Checkpoints(str(tmp_path), {"w": tf.Variable([1.0, 2.0])}, keep=1)
    read = [saver.save(1, {})]

    def held_by_none(path):
        return contextlib.nullcontext(path not in read)

    monkeypatch.setattr(checkpoints, "held_by_none", held_by_none)
    saver.save(2, {})
    assert steps_of(str(tmp_path)) == [1, 2]
    read.clear()
    saver.save(3, {})
    assert steps_of(str(tmp_path)) == [3]
