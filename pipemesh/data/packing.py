"""Packing: sentences joined into rows of one length, so that no position is wasted.

A sentence with pieces t1..tn becomes n + 1 positions. The model reads BOS, t1, .., tn and predicts
t1, .., tn, EOS. All positions of all sentences form one stream, which is cut when a row is full. A
sentence that crosses the end of a row continues in the next row as a new segment. Nothing is
dropped, and no position sees another segment.

    pieces        a b | c d e | f                       rows of 5
    ids           BOS a b BOS c    d e BOS f .
    labels        a   b EOS c d    e EOS f EOS .
    segment_ids   1   1 1 2   2    1 1 2 2 0
    segment_pos   0   1 2 0   1    0 1 0 1 0
    weights       1   1 1 1   1    1 1 1 1 0
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def token_stream(
    sentences: tf.data.Dataset,
    tokenize: Callable[[tf.Tensor], tf.RaggedTensor],
    bos_id: int,
    eos_id: int,
) -> tf.data.Dataset:
    """Turns groups of sentences into groups of positions, pairs of int32 tensors (ids, labels).

    No sentence contains the piece `bos_id`.
    """

    # AutoGraph would take longer to convert these functions than TensorFlow to run them.
    @tf.autograph.experimental.do_not_convert
    def positions(group: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pieces = tokenize(group)
        column = tf.ones_like(pieces.row_lengths()[:, tf.newaxis], pieces.dtype)
        ids = tf.concat([column * bos_id, pieces], axis=1)
        labels = tf.concat([pieces, column * eos_id], axis=1)
        return ids.flat_values, labels.flat_values

    return sentences.map(positions)


def pack(
    stream: tf.data.Dataset, *, batch_size: int, sequence_length: int, bos_id: int
) -> tf.data.Dataset:
    """Cuts a stream of positions (ids, labels) into batches of rows.

    Only the end of a finite stream is padded: its last row and its last batch. Padding is 0 in
    every tensor. Batches are dicts of tensors [batch_size, sequence_length]: `ids`, `labels`,
    `segment_ids` (from 1 in each row), `segment_pos` (from 0 in each segment), all int32, and
    `weights`, float32.
    """

    def rows(values: tf.Tensor) -> tf.Tensor:
        missing = batch_size * sequence_length - tf.size(values)
        return tf.reshape(tf.pad(values, [[0, missing]]), [batch_size, sequence_length])

    @tf.autograph.experimental.do_not_convert
    def batch(ids: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
        real, ids = rows(tf.ones_like(ids)), rows(ids)
        weights = tf.cast(real, tf.float32)
        return batch_of(ids, rows(labels), weights, tf.equal(ids, bos_id), real)

    return stream.rebatch(batch_size * sequence_length).map(batch)


def batch_of(
    ids: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, begins: tf.Tensor, real: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Returns a batch of packed rows, as in `pack`, from tensors [batch_size, sequence_length].

    `begins` is true where a segment starts; `real` is int32, 0 for padding and otherwise 1.
    """
    return {"labels": labels, "weights": weights, **placed(ids, begins, real)}


def placed(ids: tf.Tensor, begins: tf.Tensor, real: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns tokens with their segments and positions, which are 0 for padding."""
    segment_ids, segment_pos = segments(begins)
    return {"ids": ids, "segment_ids": segment_ids * real, "segment_pos": segment_pos * real}


def segments(begins: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Numbers the segments of each row from 1, and the positions of each segment from 0.

    `begins` [B, T] is true where a sentence starts. The start of a row always starts a segment.
    """
    sizes = tf.shape(begins)
    begins |= tf.equal(tf.range(sizes[1]), 0)
    segment_ids = tf.cumsum(tf.cast(begins, tf.int32), axis=1)
    # All rows as one sequence: the start of each segment, looked up by its number.
    line = tf.range(tf.reduce_prod(sizes))
    heads = tf.boolean_mask(line, tf.reshape(begins, [-1]))
    number = tf.cumsum(tf.cast(tf.reshape(begins, [-1]), tf.int32)) - 1
    segment_pos = line - tf.gather(heads, number)
    return segment_ids, tf.ensure_shape(tf.reshape(segment_pos, sizes), begins.shape)
