"""Datasets as inputs of lingvo."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers import DatasetInput
from pipemesh.layers.dataset_input import as_batch

X = np.arange(12, dtype=np.float32).reshape([6, 2])
Y = np.arange(6)


def pairs():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def generator(dataset):
    return DatasetInput.Params().Set(name="input", dataset=dataset).Instantiate()


def test_lingvo_reads_one_epoch_and_then_another():
    """As lingvo's programs do it: until it ends, then from the beginning."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = generator(pairs)
        batch = made.GetPreprocessedInputBatch()
        assert isinstance(batch, py_utils.NestedMap)
        made.Initialize(session)
        for _ in range(2):
            found = [session.run(batch) for _ in range(2)]
            np.testing.assert_array_equal(np.concatenate([b.inputs for b in found]), X)
            np.testing.assert_array_equal(np.concatenate([b.labels for b in found]), Y)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(batch)
            made.Reset(session)


def test_lingvo_reads_eagerly_too(eagerly):
    made = generator(pairs)
    for _ in range(2):
        assert made.GetPreprocessedInputBatch().labels.numpy().tolist() == [0, 1, 2, 3]
        made.GetPreprocessedInputBatch()
        with pytest.raises(tf.errors.OutOfRangeError):
            made.GetPreprocessedInputBatch()
        made.Reset()


def test_a_place_in_it_can_be_saved(eagerly, tmp_path):
    iterator = iter(generator(pairs).datasource.GetDataset())
    next(iterator)
    path = tf.train.Checkpoint(it=iterator).write(str(tmp_path / "place"))
    again = iter(generator(pairs).datasource.GetDataset())
    tf.train.Checkpoint(it=again).read(path)
    assert [batch.labels.numpy().tolist() for batch in again] == [[4, 5]]


@pytest.mark.parametrize(
    ("element", "names"),
    [
        ((X, Y), ["inputs", "labels"]),
        ((X, Y, Y), ["inputs", "labels", "weights"]),
        ({"ids": X, "more": {"a": Y}}, ["ids", "more.a"]),
        (({"a": X, "b": X}, Y), ["inputs.a", "inputs.b", "labels"]),
        (py_utils.NestedMap(ids=X), ["ids"]),
    ],
)
def test_a_batch_is_a_nested_map(eagerly, element, names):
    (batch,) = generator(lambda: tf.data.Dataset.from_tensors(element)).datasource.GetDataset()
    assert [name for name, _ in batch.FlattenItems()] == names
    assert [name for name, _ in as_batch(element).FlattenItems()] == names


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (None, r"input: dataset is None; give a function without arguments"),
        (lambda: [X], r"dataset\(\) returned a list; it must return a tf.data.Dataset"),
        (lambda: tf.data.Dataset.from_tensors(X), r"a batch is an? .*; it must be a NestedMap"),
        (lambda: tf.data.Dataset.from_tensors((X, X, X, X)), r"a batch is a tuple"),
    ],
)
def test_what_is_no_dataset_of_batches_is_an_error(eagerly, dataset, text):
    with pytest.raises(PipelineError, match=text):
        generator(dataset).Dataset()
