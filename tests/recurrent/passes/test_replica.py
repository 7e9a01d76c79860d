"""A replica's part of a traced graph."""

import tensorflow as tf

from pipemesh.backend.labels import labelled
from pipemesh.recurrent.passes.captures import Captured
from pipemesh.recurrent.passes.gradients import StageGradients
from pipemesh.recurrent.passes.replica import joined, replica_scope
from tests.recurrent.passes.traced import DEVICES, traced_stage


def test_operations_of_a_replica_say_where_they_belong():
    with tf.Graph().as_default():
        with replica_scope("embed", "CPU:2", 1):
            ours = tf.constant(1).op
        with replica_scope("embed", "CPU:2", None):
            only = tf.constant(1).op
        outside = tf.constant(1).op
    assert ours.device == only.device == "/device:CPU:2" and outside.device == ""
    assert (labelled("stage", ours.name), labelled("replica", ours.name)) == ("embed", "1")
    assert (labelled("stage", only.name), labelled("replica", only.name)) == ("embed", None)
    assert labelled("stage", outside.name) is None


def test_gradients_of_replicas_follow_each_other_and_the_carry_has_one():
    first = StageGradients({0: "a:0"}, {0: "c:0"}, ["w:0", None], ["x:0"], ["s:0"], [None])
    second = StageGradients({1: "b:0"}, {}, ["v:0", ("r:0", "i:0")], [None], [None], ["p:0"])
    assert joined([first, second]) == StageGradients(
        of_outputs={0: "a:0", 1: "b:0"},
        of_carry_out={0: "c:0"},
        of_theta=["w:0", None, "v:0", ("r:0", "i:0")],
        of_inputs=["x:0", None],
        of_carry=["s:0"],
        of_probes=[None, "p:0"],
    )
    assert joined([first]) == first


def test_a_replica_has_its_own_stand_ins_for_what_was_captured():
    with tf.Graph().as_default() as graph:
        traced = traced_stage(replicas=2)
        value = tf.constant([1, 2], tf.int32, name="value")
        replica = traced.replicas[1]
        assert replica.copies == {}
        replica.copy_captured(graph, [Captured(value, value.name, value, (), None)])
        copy = graph.get_tensor_by_name(replica.copies[value.name])
    assert (copy.op.type, copy.dtype, copy.shape) == ("Placeholder", tf.int32, [2])
    assert copy.name != value.name


def test_the_gradient_lies_on_the_replicas_device_and_counts_outputs_on():
    with tf.Graph().as_default():
        traced = traced_stage(replicas=2)
        for number, replica in enumerate(traced.replicas):
            graph = replica.outputs[0].graph
            assert (replica.number, replica.device) == (number, DEVICES[number])
            # Forward, then the gradient that was added.
            assert len(replica.operations) == 2
            begin, end = replica.operations[1]
            added = graph.get_operations()[begin:end]
            assert {op.device for op in added} == {f"/device:{DEVICES[number]}"}
            assert {labelled("replica", op.name) for op in added} == {str(number)}
            again = replica.differentiate(graph, traced.stage, [], [0], 5)
            assert [*again.of_outputs] == [5]
            assert len(again.of_theta) == 2
            assert len(replica.operations) == 3
            none = replica.differentiate(graph, traced.stage, [], [], 5)
            assert none.of_outputs == {} and none.of_theta == [None, None]
