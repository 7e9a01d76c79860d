"""Where in a stage values that are not finite are looked for."""

import tensorflow as tf

from tests.recurrent.passes.traced import traced_stage


def everything(name):
    return True


def probes_of(**given):
    with tf.Graph().as_default():
        traced = traced_stage(**given)
    return traced, traced.replicas[0].probes


def test_going_forward_each_layer_is_looked_at_in_order():
    _, probes = probes_of()
    found = probes.forward(everything)
    assert [probe.layers for probe in found] == [("first",), ("second",)]
    assert probes.names == [name for probe in found for name in probe.tensors]
    assert all("Tanh" in name for name in probes.names)


def test_what_nobody_computes_is_not_looked_at():
    _, probes = probes_of()
    (last,) = probes.names[1:]
    assert [probe.layers for probe in probes.forward(lambda name: name == last)] == [("second",)]
    assert probes.forward(lambda name: False) == []


def test_outputs_of_no_layer_are_looked_at_without_blame():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(inputs[0], theta[0]), inputs[0], tf.shape(inputs[0])], carry

    _, probes = probes_of(forward=forward)
    (probe,) = probes.forward(everything)
    assert probe.layers == () and len(probe.tensors) == 1 and "MatMul" in probe.tensors[0]


def test_weights_and_inputs_know_the_layers_that_use_them():
    _, probes = probes_of()
    assert probes.theta_layers == [("first",), ("second",)]
    assert probes.input_layers == [("first",)]


def test_going_backward_the_user_of_a_value_is_to_blame_for_its_gradient():
    _, probes = probes_of()
    names = [f"g{i}" for i in range(len(probes.sources))]
    found = probes.backward(names, ["input"], False, everything)
    # Nobody in the stage uses what the last layer gives.
    assert [probe.layers for probe in found] == [(), ("second",), ("first",)]
    assert found[-1].tensors == ("input",)


def test_in_the_first_stage_the_place_where_weights_meet_data_stands_for_the_inputs():
    _, probes = probes_of()
    names = [f"g{i}" for i in range(len(probes.sources))]
    found = probes.backward(names, ["input"], True, everything)
    assert found[-1].layers == ("first",) and "input" not in found[-1].tensors
    assert [name for probe in found for name in probe.tensors] == names
    assert "MatMul" in probes.sources[-1].name


def test_gradients_that_do_not_exist_or_are_not_computed_are_left_out():
    _, probes = probes_of()
    names = [None] * len(probes.sources)
    assert probes.backward(names, [None], True, everything) == []
    names = [f"g{i}" for i in range(len(probes.sources))]
    found = probes.backward(names, ["input"], False, lambda name: name == "input")
    assert [probe.tensors for probe in found] == [("input",)]
