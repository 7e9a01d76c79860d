"""TensorFlow's collective operations; that they compute the right thing is tested in `lowering`."""

import functools

import pytest
import tensorflow as tf

from pipemesh.backend import collectives, tpu_operations
from pipemesh.backend.collectives import Meeting


@pytest.mark.parametrize(
    "kind, call",
    [
        ("CollectiveReduceV2", functools.partial(collectives.reduce, merge_op="Add")),
        ("CollectiveGatherV2", collectives.gather),
        ("CollectiveAllToAllV2", collectives.all_to_all),
    ],
)
def test_every_operation_says_who_meets_and_has_the_token_of_its_core(kind, call):
    @tf.function
    def run(x, token):
        return call(x, meeting=Meeting(2, tf.constant(5), 7, token))

    specs = tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.resource)
    graph = run.get_concrete_function(*specs).graph
    (found,) = [op for op in graph.get_operations() if op.type == kind]
    assert [tf.get_static_value(x) for x in list(found.inputs)[1:4]] == [2, 5, 7]
    assert found.inputs[4] is graph.inputs[1]


def test_a_process_that_nobody_connected_has_no_server():
    assert collectives.server() is None


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
