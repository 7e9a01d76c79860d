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
def test_returning_data_continue_at_their_position(folder, tmp_path, saved_at):
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


def test_an_unfinished_checkpoint_is_no_data_position(folder):
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


def test_without_a_position_the_data_error_is_reported(folder):
    batches = Batches(lines(folder), 2)
    path = save(batches, folder, 0)
    again = Batches(lines(folder), 2)
    again.go_to(path)
    os.unlink(f"{path}.index")
    os.rename(folder / "text-1", folder / "away")
    with pytest.raises(DataError, match="cannot be read any more"):
        take(again, 20)


def test_a_position_in_a_tuned_dataset_is_restored(folder, tmp_path):
    """Earlier releases let TensorFlow tune the dataset."""
    tuned = iter(lines(folder))
    for _ in range(4):
        next(tuned)
    path = Checkpoints(str(tmp_path), {NAME: tuned}).save(4, {})
    batches = Batches(lines(folder), 2)
    batches.go_to(path)
    whole = take(Batches(lines(folder), 2), 10)
    assert take(batches, 3) == whole[4:7]
    again = Batches(lines(folder), 2)
    again.go_to(save(batches, folder, 7))
    assert take(again, 3) == whole[7:]


def test_threads_are_tuned_only_where_the_dataset_says_so(folder):
    # To free an iterator, TensorFlow waits for the thread that tunes it.
    options = tf.data.Options()
    options.autotune.enabled = True
    own = lines(folder).with_options(options)
    for dataset, expected in ((lines(folder), False), (own, True)):
        assert Batches(dataset).dataset.options().autotune.enabled is expected
