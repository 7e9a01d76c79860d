"""Variables of the loop, rows of tables of numbers, and values that one action changes."""

import types

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.table.loop_variables import (
    Buffers,
    Fan,
)
from pipemesh.recurrent.table.machine import Channel, key_of
from pipemesh.schedule.action import OUTPUTS
from tests.recurrent.passes.traced import run

DEVICES = ("CPU:1", "CPU:2")
KEY = key_of(Channel(OUTPUTS, 0))


def buffers_of(specs, places=None, size=3, devices=DEVICES):
    """Buffers of a machine that knows these shapes alone."""
    machine = types.SimpleNamespace(
        stages=[Stage("s", None, [], [], devices)],
        specs=lambda *key: specs,
        places=lambda *key: places or [0] * len(specs),
    )
    buffers = Buffers(machine, {KEY: size})
    buffers.reserve(KEY)
    return buffers


def number(value):
    return tf.constant(value, tf.int32)


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


@pytest.mark.parametrize(("number", "wanted"), [(0, 4.0), (1, 9.0), (2, 3.0), (3, 3.0)])
def test_values_go_to_that_user_whose_number_the_step_says(number, wanted):
    """User 2 does nothing with it; 3 is nobody."""
    with tf.Graph().as_default() as graph:
        fan = Fan([tf.constant(3.0), None], ["CPU:1"] * 2, [0, 0], lambda _: tf.constant(number), 3)
        (first, none), (second, _) = fan.to(0), fan.to(1)
        assert none is None
        fan.leave(0, [first + 1, None])
        fan.leave(1, [3 * second, None])
        (found, _) = fan.merged()
        assert run(found) == wanted
        assert [op.type for op in graph.get_operations()].count("_SwitchN") == 1
        with pytest.raises(tf.errors.InvalidArgumentError, match="Retval"):
            run([fan.to(user)[0] for user in range(4) if user != number])
