"""The gradient of a traced stage, by name."""

import numpy as np
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.gradients import differentiate, flat_names

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
