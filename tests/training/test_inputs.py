"""Batches, and the place in the data."""

import os

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Checkpoints
from pipemesh.errors import DataError
from pipemesh.training.inputs import NAME, Batches


@pytest.fixture
def folder(tmp_path):
    """Nine lines in three files."""
    for number in range(3):
        lines = "".join(f"{number}{line}\n" for line in range(3))
        (tmp_path / f"text-{number}").write_text(lines)
    return tmp_path


def lines(folder):
    paths = [str(folder / f"text-{number}") for number in range(3)]
    dataset = tf.data.Dataset.from_tensor_slices(paths).repeat()
    return dataset.flat_map(tf.data.TextLineDataset).prefetch(2)


def take(batches, count):
    return [batches.next().numpy().decode() for _ in range(count)]


def save(batches, folder, step):
    path = Checkpoints(str(folder), {NAME: batches.iterator}).save(step, {"skip": batches.skip})
    batches.saved(path)
    return path


@pytest.mark.parametrize("saved_at", [[], [1], [1, 3], [4]])
def test_what_vanishes_and_comes_back_is_gone_on_with_where_it_stopped(folder, tmp_path, saved_at):
    """An iterator that has read ahead of what vanished is saved as failed: each batch once."""
    whole = take(Batches(lines(folder), 2), 30)
    os.rename(folder / "text-2", folder / "away")
    batches, read = Batches(lines(folder), 2), []
    with pytest.raises(DataError, match=r"cannot be read any more \(.*text-2; No such file"):
        while True:
            if len(read) in saved_at:
                save(batches, folder, len(read))
            read += take(batches, 1)
    last = save(batches, folder, 100)
    os.rename(folder / "away", folder / "text-2")
    again = Batches(lines(folder), 2)
    again.go_to(last, batches.skip)
    assert read + take(again, 30 - len(read)) == whole


def test_a_checkpoint_that_was_begun_and_never_finished_is_no_place(folder):
    batches = Batches(lines(folder), 2)
    take(batches, 2)
    batches.saved(str(folder / "ckpt-2"))
    os.rename(folder / "text-1", folder / "away")
    with pytest.raises(DataError):
        take(batches, 20)
    assert batches.skip >= 2, "from the beginning"


def test_data_that_end_are_told():
    with pytest.raises(DataError, match=r"cannot be read any more \(it has ended\)"):
        take(Batches(tf.data.Dataset.from_tensor_slices(["a", "b"])), 3)


def test_where_no_place_is_left_it_is_the_data_that_are_told(folder):
    batches = Batches(lines(folder), 2)
    path = save(batches, folder, 0)
    again = Batches(lines(folder), 2)
    again.go_to(path)
    os.unlink(f"{path}.index")
    os.rename(folder / "text-1", folder / "away")
    with pytest.raises(DataError, match="cannot be read any more"):
        take(again, 20)
