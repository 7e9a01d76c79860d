"""Values in buffers, put and taken by index."""

import types

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.buffers import Buffers, key_of
from pipemesh.recurrent.table.values import GRADS, KEPT, OUTPUTS, PENDING, Channel
from tests.recurrent.passes.traced import run

DEVICES = ("CPU:1", "CPU:2")
KEY = key_of(Channel(OUTPUTS, 0))


def buffers_of(specs, places=None, size=3, devices=DEVICES):
    """Buffers of a machine that knows these shapes alone."""
    machine = types.SimpleNamespace(
        specs=lambda *key: specs, places=lambda *key: places or [0] * len(specs)
    )
    buffers = Buffers(machine, [Stage("s", None, [], [], devices)], {KEY: size})
    buffers.reserve(KEY)
    return buffers


def number(value):
    return tf.constant(value, tf.int32)


def test_only_what_is_kept_depends_on_the_mode_of_remat():
    assert key_of(Channel(KEPT, 1), FULL) == (KEPT, 1, FULL)
    assert key_of(Channel(PENDING, 1), NONE) == (PENDING, 1, NONE)
    assert key_of(Channel(OUTPUTS, 1), FULL) == key_of(Channel(OUTPUTS, 1), NONE)
    assert key_of(Channel(GRADS, 1)) != key_of(Channel(GRADS, 2))


def test_what_was_put_is_taken_by_its_number_and_is_gone_then():
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec([2]), None, tf.TensorSpec([], tf.int32)])
        for m in (2, 0):
            buffers.put(KEY, number(m), [tf.fill([2], float(m)), None, tf.constant(10 * m)])
        taken = buffers.take(KEY, number(2))
        assert taken[1] is None and buffers.handles[KEY][1] is None
        assert [t.shape for t in (taken[0], taken[2])] == [[2], []]
        later = buffers.take(KEY, number(0))
        left = tf.raw_ops.TensorListGetItem(
            input_handle=buffers.handles[KEY][0],
            index=tf.constant(2),
            element_shape=tf.constant(-1),
            element_dtype=tf.float32,
        )
        found = run([taken[0], taken[2], later[0], later[2], left])
    np.testing.assert_array_equal(found[0], [2, 2])
    np.testing.assert_array_equal(found[2], [0, 0])
    assert (found[1], found[3]) == (20, 0)
    assert found[4].size == 0


def test_buffers_lie_where_their_replicas_do_and_are_made_once():
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec([2])] * 3, [1, 0, 1])
        made = buffers.handles[KEY]
        assert [t.device for t in made] == [f"/device:{DEVICES[i]}" for i in (1, 0, 1)]
        buffers.reserve(KEY)
        assert all(one is other for one, other in zip(buffers.handles[KEY], made, strict=True))


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_joined_they_are_the_whole_batch(batch_dim, replicas):
    shape = [2, 4]
    parts = np.arange(3 * replicas * 8, dtype=np.float32).reshape([3, replicas, *shape])
    with tf.Graph().as_default():
        specs = [tf.TensorSpec(shape)] * replicas
        buffers = buffers_of(specs, [*range(replicas)], devices=DEVICES[:replicas])
        for m in (1, 0, 2):
            buffers.put(KEY, number(m), [tf.constant(part) for part in parts[m]])
        (joined,) = buffers.joined(KEY, Cutting(3, 2 * replicas, batch_dim, replicas))
        found = run(joined)
    np.testing.assert_array_equal(found, np.concatenate([*parts.reshape([-1, *shape])], batch_dim))


def test_joined_scalars_are_a_vector_and_what_does_not_exist_is_none():
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec([]), None], devices="CPU:1")
        for m in range(3):
            buffers.put(KEY, number(m), [tf.constant(float(m)), None])
        losses, none = buffers.joined(KEY, Cutting(3, 2, 0))
        assert none is None and losses.shape == [3]
        np.testing.assert_array_equal(run(losses), [0, 1, 2])


@pytest.mark.parametrize("sequence_dim", [0, 1, 2])
def test_joined_slices_are_whole_sequences_or_a_sum(sequence_dim):
    """Three dims: the batch is one of the first two; a dim that is not there adds slices up."""
    batch_dim = 1 if sequence_dim == 0 else 0
    shape = [3, 4] if sequence_dim == 2 else [3, 4, 2]
    cutting = Cutting(2, shape[batch_dim], batch_dim, 1, 3, shape[0], sequence_dim)
    parts = np.random.default_rng(0).normal(size=[2, 3, *shape]).astype(np.float32)
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec(shape)], size=6, devices="CPU:0")
        for piece in range(6):
            buffers.put(KEY, number(piece), [tf.constant(parts[divmod(piece, 3)])])
        found = run(buffers.joined(KEY, cutting)[0])
    if sequence_dim == 2:
        rows = parts.sum(1)
    else:
        rows = [np.concatenate([*row], sequence_dim) for row in parts]
    np.testing.assert_allclose(found, np.concatenate([*rows], batch_dim), rtol=1e-5)
