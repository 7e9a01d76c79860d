"""The operations of a TPU, which nobody can run here: their kinds and what they are given."""

import pytest
import tensorflow as tf

from pipemesh.backend import tpu_operations


def test_a_tpu_gets_its_groups_and_pairs_as_constants():
    groups = [[0, 1], [2, 3]]

    @tf.function
    def run(x):
        return (
            tpu_operations.all_sum(x, groups),
            tpu_operations.all_to_all(x, 1, 0, groups),
            tpu_operations.permute(x, [[0, 1]]),
        )

    graph = run.get_concrete_function(tf.TensorSpec([2, 3])).graph
    operations = {op.type: op for op in graph.get_operations()}
    for kind in ("CrossReplicaSum", "AllToAll"):
        assert tf.get_static_value(operations[kind].inputs[1]).tolist() == groups
    assert operations["AllToAll"].outputs[0].shape == [1, 6]
    assert tf.get_static_value(operations["CollectivePermute"].inputs[1]).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("concat_dim", "split_dim", "shape"), [(0, 1, [8, 4]), (1, 0, [2, 16]), (0, 0, [4, 8])]
)
def test_a_part_goes_to_each_member_of_a_group(concat_dim, split_dim, shape):
    groups = [[0, 1], [2, 3]]

    @tf.function
    def run(x):
        return tpu_operations.all_to_all(x, concat_dim, split_dim, groups)

    assert run.get_concrete_function(tf.TensorSpec([4, 8])).output_shapes == shape


def test_a_permutation_may_send_nothing():
    @tf.function
    def run(x):
        return tpu_operations.permute(x, [])

    (found,) = [
        op
        for op in run.get_concrete_function(tf.TensorSpec([2])).graph.get_operations()
        if op.type == "CollectivePermute"
    ]
    assert found.inputs[1].shape == [0, 2]
