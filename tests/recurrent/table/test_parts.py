"""A microbatch's rows of the whole batch, by a number that only the step knows."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.table.parts import parts


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_each_replica_gets_its_neighbouring_rows(replicas, batch_dim):
    x = np.arange(12 * 12).reshape([12, 12])
    cutting = Cutting(3, 4, batch_dim, replicas)
    found = parts([tf.constant(x), None], tf.constant(1, tf.int64), cutting)
    assert found[1::2] == [None] * replicas
    wanted = np.split(np.split(x, 3, axis=batch_dim)[1], replicas, axis=batch_dim)
    for one, other in zip(found[::2], wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("batch_dim", "sequence_dim"), [(0, 1), (1, 0)])
def test_a_slice_gets_its_positions_and_what_is_no_sequence_whole(batch_dim, sequence_dim):
    x = np.arange(12 * 12 * 2).reshape([12, 12, 2])
    cutting = Cutting(3, 4, batch_dim, 2, 4, 3, sequence_dim)
    found = parts([tf.constant(x)], tf.constant(6, tf.int64), cutting)
    columns = np.split(x, 4, axis=sequence_dim)[2]
    for one, other in zip(found, np.split(columns, 6, axis=batch_dim)[2:4], strict=True):
        np.testing.assert_array_equal(one, other)
    if batch_dim == 0:
        (scales, _) = parts([tf.range(12)], tf.constant(6, tf.int64), cutting)
        np.testing.assert_array_equal(scales, [4, 5])
