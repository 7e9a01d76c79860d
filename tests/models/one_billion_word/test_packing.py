"""Packing loses no token, and segments stay apart."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from models.one_billion_word import packing

BOS, EOS = 1, 2
KEYS = {"ids", "labels", "segment_ids", "segment_pos", "weights"}


def tokenize(lines):
    return tf.strings.to_number(tf.strings.split(lines), tf.int32)


def pack(sentences, batch_size, length, group=3):
    lines = [" ".join(map(str, pieces)) for pieces in sentences]
    dataset = tf.data.Dataset.from_tensor_slices(tf.constant(lines, tf.string)).batch(group)
    stream = packing.token_stream(dataset, tokenize, BOS, EOS)
    batches = packing.pack(stream, batch_size=batch_size, sequence_length=length, bos_id=BOS)
    return list(batches.as_numpy_iterator())


def rows(batches):
    return {key: np.concatenate([batch[key] for batch in batches]) for key in KEYS}


def test_the_table_of_the_docstring():
    a, b, c, d, e, f = range(10, 16)
    (batch,) = pack([[a, b], [c, d, e], [f]], batch_size=2, length=5)
    expected = {
        "ids": [[BOS, a, b, BOS, c], [d, e, BOS, f, 0]],
        "labels": [[a, b, EOS, c, d], [e, EOS, f, EOS, 0]],
        "segment_ids": [[1, 1, 1, 2, 2], [1, 1, 2, 2, 0]],
        "segment_pos": [[0, 1, 2, 0, 1], [0, 1, 0, 1, 0]],
        "weights": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    }
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(batch[key], value, err_msg=key)
        assert batch[key].dtype == (np.float32 if key == "weights" else np.int32)


PIECES = st.lists(st.integers(3, 99), min_size=1, max_size=9)


@settings(deadline=None, max_examples=12)
@given(
    sentences=st.lists(PIECES, min_size=1, max_size=12),
    batch_size=st.integers(1, 3),
    length=st.integers(1, 8),
    group=st.integers(1, 5),
)
@pytest.mark.slow
def test_every_position_is_there_once_and_knows_its_segment(sentences, batch_size, length, group):
    batches = pack(sentences, batch_size, length, group)
    assert all(batch[key].shape == (batch_size, length) for batch in batches for key in KEYS)
    row = rows(batches)
    real = row["weights"].ravel() == 1
    stream_ids = [piece for pieces in sentences for piece in [BOS, *pieces]]
    stream_labels = [piece for pieces in sentences for piece in [*pieces, EOS]]
    assert row["ids"].ravel()[real].tolist() == stream_ids
    assert row["labels"].ravel()[real].tolist() == stream_labels
    assert real[: len(stream_ids)].all(), "only the end is padded"
    assert real.size - len(stream_ids) < batch_size * length, "no batch is all padding"
    for key in KEYS:
        assert not row[key].ravel()[~real].any(), f"padding is 0 in {key}"
    # Walk through every row the slow way.
    for ids, segment_ids, segment_pos, weights in zip(
        *(row[key] for key in ("ids", "segment_ids", "segment_pos", "weights")), strict=True
    ):
        segment = position = 0
        for column in range(int(weights.sum())):
            if column == 0 or ids[column] == BOS:
                segment, position = segment + 1, 0
            assert (segment_ids[column], segment_pos[column]) == (segment, position)
            position += 1


def test_another_sentence_of_the_same_length_changes_its_own_segment_only():
    before = [[11, 12], [13, 14, 15], [16], [17, 18]]
    after = [[11, 12], [23, 24, 25], [16], [17, 18]]
    (one,), (two,) = pack(before, 1, 20), pack(after, 1, 20)
    for key in ("segment_ids", "segment_pos", "weights"):
        np.testing.assert_array_equal(one[key], two[key])
    changed = one["segment_ids"] == 2
    for key in ("ids", "labels"):
        np.testing.assert_array_equal(one[key][~changed], two[key][~changed])
        assert (one[key] != two[key])[changed].any()


def test_shapes_are_static():
    stream = tf.data.Dataset.from_tensors((tf.constant([BOS, 3]), tf.constant([3, EOS])))
    dataset = packing.pack(stream, batch_size=4, sequence_length=8, bos_id=BOS)
    assert dataset.element_spec == {
        key: tf.TensorSpec([4, 8], tf.float32 if key == "weights" else tf.int32) for key in KEYS
    }


@pytest.mark.parametrize("empty", [[], [[]]])
def test_groups_without_pieces(empty):
    assert pack(empty, 1, 4) == [] if not empty else pack(empty, 1, 4)[0]["weights"].sum() == 1


def test_an_empty_group_in_the_middle_is_passed_over():
    def keep(lines):
        return tf.boolean_mask(lines, tf.not_equal(lines, "drop"))

    lines = tf.data.Dataset.from_tensor_slices(["3", "4", "drop", "drop", "5"]).batch(2).map(keep)
    stream = packing.token_stream(lines, tokenize, BOS, EOS)
    (batch,) = packing.pack(stream, batch_size=1, sequence_length=6, bos_id=BOS)
    assert batch["labels"].numpy().tolist() == [[3, EOS, 4, EOS, 5, EOS]]
