"""What Python's calls of a stage leave behind."""

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.tracing import trace, whole_draws

DEVICES = ("CPU:1", "CPU:2")
X = tf.TensorSpec([2, 3])


def stage_of(forward, devices=DEVICES, theta=(2.0,)):
    return Stage("s", forward, [*map(tf.constant, theta)], [tf.constant(0)], devices)


def test_an_output_has_a_name_of_its_own():
    def twice(theta, carry, inputs, microbatch, step):
        return [inputs[0], inputs[0]], carry

    with tf.Graph().as_default():
        (replica,) = trace(stage_of(twice), [X], False).replicas
    names = [t.name for t in [*replica.inputs, *replica.outputs, *replica.carry_out]]
    assert len({*names, replica.carry[0].name}) == 5


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


def test_the_whole_batch_is_traced_only_as_far_as_needed():
    calls = []

    def drops(name):
        def forward(theta, carry, inputs, microbatch, step):
            calls.append((name, inputs[0].shape.as_list()))
            with layer_scope(name):
                return [tf.nn.dropout(inputs[0], 0.5)[:, :2]], carry

        return forward

    with tf.Graph().as_default():
        stages = [stage_of(drops(name), "CPU:0") for name in "abc"]
        whole = whole_draws(stages, [tf.TensorSpec([8, 3])], True, Cutting(4, 2, 0))
        assert calls == []
        one, two = next(whole), next(whole)
        assert calls == [("a", [8, 3]), ("b", [8, 2])]
        assert [draw.sizes for draw in one.by_name.values()] == [(8, 3)]
        assert [draw.sizes for draw in two.by_name.values()] == [(8, 2)]
