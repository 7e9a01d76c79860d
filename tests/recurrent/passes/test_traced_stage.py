"""A stage's graph, addressed by the names of tensors."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness.scope import WholeDraws
from pipemesh.recurrent import Home, Stage
from pipemesh.recurrent.passes.traced_stage import Places, TracedStage
from pipemesh.recurrent.passes.tracing import identity_beside
from tests.recurrent.passes.traced import (
    ROWS,
    WEIGHTS,
    WIDTH,
    X,
    cutting,
    traced_stage,
)

HOME = Home(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), num_replicas=2)
# Full names, short ones, none, and a device that is none of the home's.
DEVICES = {
    "first": "/job:localhost/replica:0/task:0/device:CPU:2",
    "second": "CPU:3",
    "nowhere": "",
    "strange": "CPU:7",
}


def graph():
    with tf.Graph().as_default() as found:
        for name, device in DEVICES.items():
            with tf.device(device or None):
                tf.constant(1.0, name=name)
    return found


@pytest.mark.parametrize(
    "name, place", [("first", 2), ("second", 3), ("nowhere", 2), ("strange", 2)]
)
def test_a_node_says_where_it_lies_among_the_devices_of_its_replica(name, place):
    assert Places(HOME, lambda _: 1, graph(), {}).of(f"{name}:0") == place


def test_what_stands_for_an_argument_lies_where_it_is_said_to():
    given = {"first:0": 1, "second:0": 0}
    places = Places(HOME, lambda name: int(name == "first:0"), graph(), given)
    assert [places.of("first:0"), places.of("second:0")] == [3, 0]


def test_of_replicas_of_one_device_the_number_is_the_place():
    assert Places(Home(HOME.devices), lambda _: 3, graph(), {}).of("first:0") == 3


def test_an_identity_lies_beside_what_it_is_of():
    with tf.Graph().as_default(), tf.device("CPU:1"):
        with tf.device("CPU:2"):
            x = tf.constant(1.0)
        assert identity_beside(x).device == x.device
        with tf.device(None):
            free = tf.constant(1.0)
        assert identity_beside(free).device == "/device:CPU:1"


def test_names_are_those_of_the_graph():
    with tf.Graph().as_default():
        traced = traced_stage()
    assert [len(traced.theta), len(traced.carry), len(traced.inputs)] == [2, 1, 1]
    assert [*map(traced.spec, traced.scalars)] == [tf.TensorSpec([], tf.int64)] * 2
    assert [*map(traced.spec, traced.theta)] == [tf.TensorSpec([WIDTH, WIDTH])] * 2
    assert [*map(traced.spec, traced.outputs)] == traced.output_specs
    assert traced.output_specs == [tf.TensorSpec([ROWS, WIDTH])]
    assert traced.spec(traced.carry_out[0]) == tf.TensorSpec([], tf.int32)
    assert traced.theta_layers == [("first",), ("second",)]
    assert traced.input_layers == [("first",)]
    assert traced.handed_on == [] and traced.effects == [] and traced.captured == []


def test_layers_are_those_of_the_forward_pass():
    with tf.Graph().as_default():
        traced = traced_stage()
    forward = traced.cut.ancestors(traced.outputs)
    found = {node.name: node.op for node in traced.nodes(0)}
    layers = {(traced.layers[n], found[n]) for n in forward if n in traced.layers}
    assert layers == {(layer, op) for layer in ("first", "second") for op in ("MatMul", "Tanh")}


def test_each_replica_has_its_own_and_says_where():
    with tf.Graph().as_default():
        traced = traced_stage(replicas=2)
    assert [len(traced.theta), len(traced.carry), len(traced.inputs)] == [4, 1, 2]
    names = [*traced.theta, *traced.inputs, *traced.outputs]
    assert [*map(traced.place, names)] == [0, 0, 1, 1, 0, 1, 0, 1]
    assert [*map(traced.place, traced.gradients.of_theta)] == [0, 0, 1, 1]
    assert traced.place(traced.scalars[0]) == 0
    assert [*map(traced.place, traced.handed_on)] == [1]
    for replica in (0, 1):
        nodes = list(traced.nodes(replica))
        assert sum(node.op == "MatMul" for node in nodes) == 6
        assert {traced.place(f"{node.name}:0") for node in nodes} == {replica}


def test_a_variable_that_is_not_in_theta_becomes_the_last_of_it():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(inputs[0], theta[0]) + variable], carry

    with tf.Graph().as_default():
        variable = tf.Variable(X[0])
        traced = traced_stage(forward, theta=WEIGHTS[:1])
        assert len(traced.given.theta) == 1 and len(traced.stage.theta) == 2
        assert len(traced.theta) == len(traced.gradients.of_theta) == 2
        assert [t.shape for t in traced.captured] == [[WIDTH]]
    assert all(traced.gradients.of_theta)


def test_a_graph_with_state_is_an_error():
    def forward(theta, carry, inputs, microbatch, step):
        counter.assign_add(1.0)
        return [inputs[0] * theta[0][0]], carry

    with tf.Graph().as_default():
        counter = tf.Variable(0.0)
        traced_stage().check_pure()
        with pytest.raises(PipelineError, match=r"(?s)stage 's'.*AssignAddVariableOp"):
            traced_stage(forward).check_pure()


def test_a_tensor_with_a_row_for_each_example_is_an_error():
    rows = tf.Graph()
    with rows.as_default():
        whole = tf.compat.v1.placeholder(tf.float32, [cutting().num_parts * ROWS, WIDTH])

        def forward(theta, carry, inputs, microbatch, step):
            return [inputs[0] + whole[:ROWS]], carry

        with pytest.raises(PipelineError, match="has a row for each of the 4 examples"):
            traced_stage(forward)


def test_what_checks_is_an_effect_of_the_forward_pass():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.debugging.check_numerics(inputs[0], "bad") * theta[0][0]], carry

    with tf.Graph().as_default():
        (name,) = traced_stage(forward).effects
    assert "CheckNumerics" in name


def test_no_gradient_is_added_for_outputs_that_none_arrives_at():
    def forward(theta, carry, inputs, microbatch, step):
        return [inputs[0] * theta[0][0], inputs[0] * theta[1][0]], carry

    with tf.Graph().as_default():
        stage = Stage("s", forward, [*map(tf.constant, WEIGHTS)], [], "CPU:0")
        given = [tf.TensorSpec([ROWS, WIDTH])]
        traced = TracedStage(stage, given, cutting(), False, lambda: WholeDraws({}, None))
        traced.differentiate([1])
    of_first, of_second = traced.gradients.of_theta
    assert [*traced.gradients.of_outputs] == [1] and of_first is None and of_second is not None


def test_recomputation_is_not_among_the_nodes_of_a_microbatch():
    with tf.Graph().as_default():
        traced = traced_stage()
    wanted = [*traced.outputs, *traced.carry_out, *traced.gradients.of_theta]
    wanted += traced.gradients.of_inputs
    assert traced.num_nodes() == len(traced.cut.ancestors(wanted))


def test_probes_look_at_what_is_computed_and_say_where():
    with tf.Graph().as_default():
        traced = traced_stage(replicas=2)
    forward = traced.forward_probes()
    assert [(probe.layers, probe.replica) for probe in forward] == [
        ((layer,), place) for place in (0, 1) for layer in ("first", "second")
    ]
    backward = [(probe.layers, probe.replica) for probe in traced.backward_probes(False)]
    # The gradient of what a layer returns is made by the layers after it.
    assert (("second",), 0) in backward and (("first",), 1) in backward
    assert [place for _, place in backward] == sorted(place for _, place in backward)
    for probe in forward:
        assert {*map(traced.replica, probe.tensors)} == {probe.replica}


def test_outputs_are_what_the_stage_computes():
    with tf.Graph().as_default():
        traced = traced_stage()
        names = [*traced.theta, *traced.inputs]

        @tf.function(autograph=False)
        def run():
            values = map(tf.constant, [*WEIGHTS, X])
            return traced.cut.paste(dict(zip(names, values, strict=True)), traced.outputs)

        with tf.compat.v1.Session() as session:
            (found,) = session.run(run())
    wanted = np.tanh(np.tanh(X @ WEIGHTS[0]) @ WEIGHTS[1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
