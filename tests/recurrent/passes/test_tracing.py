"""What Python's calls of a stage leave behind."""

import pytest
import tensorflow as tf

from pipemesh.backend.labels import labelled
from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope
from pipemesh.randomness.scope import Position
from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.tracing import WholeBatch, output_specs, specs_of, trace

DEVICES = ("CPU:1", "CPU:2")
X = tf.TensorSpec([2, 3])


def stage_of(forward, devices=DEVICES, theta=(2.0,)):
    return Stage("s", forward, [*map(tf.constant, theta)], [tf.constant(0)], devices)


def scale(theta, carry, inputs, microbatch, step):
    with layer_scope("scaled"):
        return [inputs[0] * theta[0]], [carry[0] + 1]


def test_specs_are_shapes_and_dtypes():
    found = specs_of([tf.zeros([2, 3]), tf.constant(1, tf.int64)])
    assert found == [tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int64)]


def test_a_stage_is_called_once_for_each_replica_on_its_device():
    with tf.Graph().as_default():
        found = trace(stage_of(scale), [X], False, 2)
    operations = found.graph.get_operations()
    assert [replica.number for replica in found.replicas] == [0, 1]
    for replica, device in zip(found.replicas, DEVICES, strict=True):
        assert replica.device == device
        assert specs_of(replica.outputs) == [X] and specs_of(replica.carry_out) == [
            tf.TensorSpec([], tf.int32)
        ]
        own = operations[slice(*replica.operations[0])]
        of_layer = [op for op in own if labelled("layer", op.name) == "scaled"]
        (product,) = (op for op in of_layer if op.type == "Mul")
        assert product.device == f"/device:{device}"
        assert product.inputs[1] is replica.theta[0]
        assert [span.layer for span in replica.spans] == ["scaled"]


def test_the_carry_goes_through_the_replicas_without_a_gradient():
    with tf.Graph().as_default():
        first, second = trace(stage_of(scale), [X], False, 2).replicas
    assert second.carry[0].op.type == "StopGradient"
    assert second.carry[0].op.inputs[0] is first.carry_out[0]


def test_a_stage_that_is_called_once_has_no_number_and_takes_its_first_device():
    with tf.Graph().as_default():
        (replica,) = trace(stage_of(scale), [X], False).replicas
    assert replica.number is None and replica.device == "CPU:1"


def test_an_output_has_a_name_of_its_own():
    def twice(theta, carry, inputs, microbatch, step):
        return [inputs[0], inputs[0]], carry

    with tf.Graph().as_default():
        (replica,) = trace(stage_of(twice), [X], False).replicas
    names = [t.name for t in [*replica.inputs, *replica.outputs, *replica.carry_out]]
    assert len({*names, replica.carry[0].name}) == 5


@pytest.mark.parametrize("has_step", [False, True])
def test_a_step_is_given_if_there_is_one(has_step):
    given = []

    def forward(theta, carry, inputs, microbatch, step):
        given.append(step)
        return inputs, carry

    with tf.Graph().as_default():
        trace(stage_of(forward), [X], has_step)
    assert [step is not None for step in given] == [has_step]


def test_each_replica_is_told_which_part_of_the_batch_it_has():
    parts, asked = [], []

    def forward(theta, carry, inputs, microbatch, step):
        parts.append(microbatch)
        return inputs, carry

    def position(part):
        asked.append(part)
        return Position(part, 4, 2, None)

    with tf.Graph().as_default():
        found = trace(stage_of(forward), [X], False, 2, position)
    assert all(one is other for one, other in zip(parts, asked, strict=True))
    microbatch = found.graph.inputs[-2]
    with tf.compat.v1.Session(graph=found.graph) as session:
        with found.graph.as_default():
            assert session.run(parts, {microbatch.name: 3}) == [6, 7]


def test_replicas_that_do_not_return_alike_are_an_error():
    calls = []

    def forward(theta, carry, inputs, microbatch, step):
        calls.append(None)
        return [inputs[0]] * len(calls), carry

    text = (
        r"stage 's' has replicas.* gives float32\(2, 3\), int32\(\) in replica 0, but "
        r"float32\(2, 3\), float32\(2, 3\), int32\(\) in replica 1"
    )
    with tf.Graph().as_default(), pytest.raises(PipelineError, match=text):
        trace(stage_of(forward), [X], False, 2)


def test_output_specs_are_those_of_one_call():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(inputs[0], 1), tf.shape(inputs[0])], carry

    with tf.Graph().as_default():
        found = output_specs(stage_of(forward), [X], False)
    assert found == [tf.TensorSpec([2]), tf.TensorSpec([2], tf.int32)]


def test_the_whole_batch_goes_through_the_stages_before_as_far_as_anybody_asks():
    calls = []

    def drops(name):
        def forward(theta, carry, inputs, microbatch, step):
            calls.append((name, inputs[0].shape.as_list()))
            with layer_scope(name):
                return [tf.nn.dropout(inputs[0], 0.5)[:, :2]], carry

        return forward

    with tf.Graph().as_default():
        stages = [stage_of(drops(name), "CPU:0") for name in "abc"]
        whole = WholeBatch(stages, [tf.TensorSpec([8, 3])], True, Cutting(4, 2, 0))
        assert calls == []
        draws = whole.draws(1)
        assert calls == [("a", [8, 3]), ("b", [8, 2])]
        assert whole.draws(1) is draws
        assert whole.draws(0) is not draws
        assert len(calls) == 2
