"""TensorFlow's collective operations; that they compute the right thing is tested in `lowering`."""

import functools

import pytest
import tensorflow as tf

from pipemesh.backend import collectives
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
