"""A replica's part of a traced graph."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.labels import labelled
from pipemesh.errors import PipelineError
from pipemesh.recurrent import Home, Stage, pipeline
from pipemesh.recurrent.passes.captures import Captured
from pipemesh.recurrent.passes.replica import (
    StageGradients,
    Summaries,
    differentiate,
    flat_names,
    joined,
    replica_scope,
)
from pipemesh.schedule import gpipe
from tests.recurrent.passes.traced import DEVICES, WEIGHTS, WIDTH, traced_stage

X = np.float32([1.0, 2.0])


def differentiated(forward, theta, carry, inputs, *, live=None, probed=None, recurrent=False):
    """What `differentiate` names, once the stage's forward pass is in the current graph."""
    theta, carry, inputs = ([*map(tf.constant, group)] for group in (theta, carry, inputs))
    outputs, carry_out = forward(theta, carry, inputs)
    stage = Stage("s", None, theta, carry, "CPU:0", recurrent=recurrent)
    chosen = {i: outputs[i] for i in (range(len(outputs)) if live is None else live)}
    looked_at = [] if probed is None else probed(outputs)
    return differentiate(stage, theta, carry, inputs, chosen, carry_out, looked_at)


def values(names, feeds):
    """What the tensors are if all gradients that arrive are these."""
    graph = tf.compat.v1.get_default_graph()
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(names, feeds)


def test_no_name_is_none_and_a_sparse_gradient_has_two():
    assert flat_names(["a:0", None, ("b:0", "c:0"), "a:0"]) == ["a:0", "b:0", "c:0", "a:0"]
    assert flat_names([]) == []


def test_each_floating_source_has_the_gradient_of_what_depends_on_it():
    def forward(theta, carry, inputs):
        return [inputs[0] * theta[0], inputs[1]], carry

    with tf.Graph().as_default():
        found = differentiated(forward, [np.float32(3), np.float32(5)], [0], [X, [7, 8]])
        assert [*found.of_outputs] == [0]
        assert found.of_theta[1] is None
        assert found.of_inputs[1] is None
        assert (found.of_carry, found.of_carry_out, found.of_probes) == ([None], {}, [])
        arriving = {found.of_outputs[0]: [10.0, 100.0]}
        of_weight, of_input = values([found.of_theta[0], found.of_inputs[0]], arriving)
    assert of_weight == 10.0 * 1 + 100.0 * 2
    np.testing.assert_array_equal(of_input, [30.0, 300.0])


def test_no_gradient_arrives_but_at_the_live_outputs():
    def forward(theta, carry, inputs):
        return [inputs[0] * theta[0], inputs[0] * theta[1]], carry

    with tf.Graph().as_default():
        found = differentiated(forward, [np.float32(3), np.float32(5)], [], [X], live=[1])
        assert [*found.of_outputs] == [1]
        assert found.of_theta[0] is None
        assert values(found.of_theta[1], {found.of_outputs[1]: [1.0, 1.0]}) == 3.0
        nothing = differentiated(forward, [np.float32(3), np.float32(5)], [], [X], live=[])
    assert (nothing.of_outputs, nothing.of_theta, nothing.of_inputs) == ({}, [None] * 2, [None])


def test_looked_up_rows_have_a_sparse_gradient():
    def forward(theta, carry, inputs):
        return [tf.gather(theta[0], inputs[0])], carry

    with tf.Graph().as_default():
        found = differentiated(forward, [np.float32([[1], [2], [3]])], [], [[2, 0]])
        rows, indices = values(found.of_theta[0], {found.of_outputs[0]: [[4.0], [5.0]]})
    np.testing.assert_array_equal(rows, [[4.0], [5.0]])
    np.testing.assert_array_equal(indices, [2, 0])


def test_looked_up_rows_of_an_input_have_a_dense_one():
    def forward(theta, carry, inputs):
        return [tf.gather(inputs[0], [1])], carry

    with tf.Graph().as_default():
        found = differentiated(forward, [], [], [X])
        of_input = values(found.of_inputs[0], {found.of_outputs[0]: [4.0]})
    np.testing.assert_array_equal(of_input, [0.0, 4.0])


def test_gradients_flow_through_the_carry_of_a_recurrent_stage_alone():
    def forward(theta, carry, inputs):
        return [inputs[0] + carry[0]], [carry[0] * 3, carry[1] + 1]

    with tf.Graph().as_default():
        found = differentiated(forward, [], [X, 0], [X], recurrent=True)
        # The count that is handed on, too, has no gradient.
        assert [*found.of_carry_out] == [0] and found.of_carry[1] is None
        arriving = {found.of_outputs[0]: [1.0, 1.0], found.of_carry_out[0]: [10.0, 20.0]}
        of_carry = values(found.of_carry[0], arriving)
        other = differentiated(forward, [], [X, 0], [X])
    np.testing.assert_array_equal(of_carry, [31.0, 61.0])
    assert other.of_carry == [None, None] and other.of_carry_out == {}


def test_what_is_looked_at_has_a_gradient_of_its_own():
    def forward(theta, carry, inputs):
        h = inputs[0] * theta[0]
        return [h * h], carry

    def probed(outputs):
        return [outputs[0].op.inputs[0]]

    with tf.Graph().as_default():
        found = differentiated(forward, [np.float32(3)], [], [X], probed=probed)
        of_h = values(found.of_probes[0], {found.of_outputs[0]: [1.0, 1.0]})
        assert len(found.of_probes) == 1
    np.testing.assert_array_equal(of_h, 2 * 3 * X)


def test_what_arrives_has_the_shape_and_dtype_of_the_output():
    def forward(theta, carry, inputs):
        return [tf.cast(inputs[0], tf.float16)], carry

    with tf.Graph().as_default() as graph:
        found = differentiated(forward, [], [], [X])
        placeholder = graph.get_tensor_by_name(found.of_outputs[0])
    assert (placeholder.op.type, placeholder.dtype, placeholder.shape) == (
        "Placeholder",
        tf.float16,
        [2],
    )


KEY = tf.compat.v1.GraphKeys.SUMMARIES


def traced(body):
    """What `body` returns while a function is traced in the current graph."""
    found = []

    def run():
        found.append(body())
        return tf.constant(0)

    tf.function(run, autograph=False).get_concrete_function()
    return found[0]


def scalars(*values, collections=None):
    for i, value in enumerate(values):
        tf.compat.v1.summary.scalar(f"s{i}", tf.constant(float(value)), collections)


def test_where_there_are_none_there_is_nothing_to_carry():
    with tf.Graph().as_default():
        assert traced(lambda: Summaries.found(0, None)) is None


def test_in_a_function_of_tf2_nobody_collects_them():
    found = []

    def body():
        tf.raw_ops.ScalarSummary(tags="s", values=1.0)
        return Summaries.found(0, None)

    @tf.function(autograph=False)
    def outer():
        found.append(traced(body))

    outer.get_concrete_function()
    assert found == [None]
    with tf.Graph().as_default():
        assert traced(body) is not None


def test_those_before_the_first_operation_are_not_looked_at():
    def body():
        scalars(1)
        return Summaries.found(len(tf.compat.v1.get_default_graph().get_operations()), None)

    with tf.Graph().as_default():
        assert traced(body) is None


def test_the_first_ones_are_merged_with_a_placeholder():
    def body():
        scalars(1, 2)
        return Summaries.found(0, None)

    with tf.Graph().as_default():
        found = traced(body)
    assert found.before.op.type == "Placeholder" and found.before.dtype == tf.string
    assert found.after.op.type == "MergeSummary"
    merged, *made = found.after.op.inputs
    assert merged is found.before
    assert [t.op.type for t in made] == ["ScalarSummary"] * 2
    assert found.collections == [KEY]


def test_later_ones_are_merged_with_the_earlier():
    def body():
        scalars(1)
        first = Summaries.found(0, None)
        begin = len(tf.compat.v1.get_default_graph().get_operations())
        scalars(2)
        return first, Summaries.found(begin, first)

    with tf.Graph().as_default():
        first, second = traced(body)
    assert second.before.op.type == "Identity" and second.before.op.inputs[0] is first.after
    assert len(second.after.op.inputs) == 2


def test_they_end_where_the_graph_would_have_collected_them():
    def body():
        scalars(1, collections=["mine"])
        return Summaries.found(0, None)

    with tf.Graph().as_default():
        found = traced(body)
        merged = tf.constant(b"")
        found.collect(merged)
        assert tf.compat.v1.get_collection("mine") == [merged]
        assert tf.compat.v1.get_collection(KEY) == []


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


HOME = Home(("CPU:1", "CPU:2"))
W = WEIGHTS[0]
ROWS = np.random.default_rng(1).normal(size=[8, WIDTH]).astype(np.float32)


class Keeps:
    """A stage that keeps a tensor in Python from one call to the next."""

    def __init__(self, of):
        self.of = of
        self.kept = None

    def __call__(self, theta, carry, inputs, microbatch, step):
        h = tf.matmul(inputs[0], theta[0])
        if self.kept is None:
            self.kept = self.of(theta, carry, inputs, microbatch)
        return [h + tf.cast(self.kept, tf.float32)], [carry[0] + 1.0]


def with_kept(of):
    @tf.function(autograph=False)
    def run():
        stage = Stage("keeps", Keeps(of), [tf.constant(W)], [tf.constant(0.0)], HOME)
        return pipeline([stage], [tf.constant(ROWS)], gpipe(1, 2))[0][0]

    return run


@pytest.mark.parametrize(
    "of",
    [
        lambda theta, carry, inputs, microbatch: inputs[0],
        lambda theta, carry, inputs, microbatch: tf.reduce_sum(tf.square(inputs[0])),
        lambda theta, carry, inputs, microbatch: tf.cast(theta[0], tf.float16)[0],
        lambda theta, carry, inputs, microbatch: carry[0],
        lambda theta, carry, inputs, microbatch: tf.cast(microbatch, tf.float32),
        lambda theta, carry, inputs, microbatch: tf.cond(
            carry[0] > 0, lambda: inputs[0], lambda: -inputs[0]
        ),
    ],
    ids=["input", "computed", "weight", "carry", "microbatch", "branch"],
)
def test_a_replica_that_uses_a_tensor_of_another_one_is_an_error(of):
    text = (
        r"stage 'keeps' has replicas, and its operation '.*replica\.1.*' \(\w+\) of replica 1 use"
    )
    with pytest.raises(PipelineError, match=text):
        with_kept(of)()


def test_what_is_the_same_for_all_replicas_may_be_kept():
    y = with_kept(lambda theta, carry, inputs, microbatch: tf.ones([WIDTH]) * 2)()
    np.testing.assert_allclose(y, ROWS @ W + 2, rtol=1e-4)


def test_a_gradient_that_uses_a_tensor_of_another_replica_is_an_error():
    kept = []

    @tf.custom_gradient
    def squared(x):
        kept[:] = [x]
        return x * x, lambda dy: 2 * dy * kept[0]

    def forward(theta, carry, inputs, microbatch, step):
        return [squared(tf.matmul(inputs[0], theta[0]))], carry

    text = r"stage 's' .*gradients.*\(Mul\) of replica 0 uses .*, which replica 1 has computed"
    with tf.Graph().as_default(), pytest.raises(PipelineError, match=text):
        traced_stage(forward, replicas=2)


def test_a_single_replica_may_keep_what_it_likes():
    keeps = Keeps(lambda theta, carry, inputs, microbatch: inputs[0])
    with tf.Graph().as_default():
        traced_stage(keeps, carry=(0.0,))
