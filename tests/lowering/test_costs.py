"""Counts of computation: those of TensorFlow's profiler, whatever the lowering and the mode."""

import functools

import pytest
import tensorflow as tf

# The flops that TensorFlow's profiler counts are registered when it is imported.
from tensorflow.python.framework import ops as framework
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401

from pipemesh.errors import MeshError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.lowering.costs import OperationCosts, Work
from pipemesh.lowering.simd.collectives import TpuLowering
from pipemesh.mesh import LayoutRules, Mesh, Shape

MESH = Mesh.from_text("a:2;b:2")
DEVICES = [f"CPU:{i}" for i in range(4)]
DENSE = ("x:8;i:6", "i:6;h:4", "h:4;i:6")
IMAGES = ("n:2;r:8;c:4;i:3", "p:3;q:3;i:3;o:2", "p:2;q:2;o:2;k:4")
WINDOW = {"r": "p", "c": "q"}


def dense(x, w, v):
    hidden = ops.softmax(ops.relu(ops.einsum([x, w], ["x", "h"])), "h")
    return ops.reduce_mean(ops.square(ops.einsum([hidden, v], ["x", "i"]) - x))


def images(x, w, v):
    y = ops.conv2d(x, w, WINDOW, padding="SAME")
    return ops.reduce_sum(ops.conv_transpose(y, v, WINDOW, padding="VALID", strides=2))


PROGRAMS = {"dense": (dense, DENSE), "images": (images, IMAGES)}
RULES = {
    "dense": ["", "x:a", "h:b", "x:a;h:b", "i:b", "x:b;i:a"],
    "images": ["", "n:a;o:b", "r:a", "r:a;c:b"],
}


def step(lowering, name, *arrays, backward=True):
    """A forward and a backward pass, with gradients of all weights."""
    program, shapes = PROGRAMS[name]
    x, *weights = (
        ops.import_tensor(lowering, array, shape)
        for array, shape in zip(arrays, shapes, strict=True)
    )
    if not backward:
        return program(x, *weights).slices[0]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = program(x, *weights)
    ops.gradients(loss, weights, tape)
    return loss.slices[0]


def ones(name):
    return [tf.ones(Shape.from_text(shape).sizes) for shape in PROGRAMS[name][1]]


@functools.cache
def counted(name, rules):
    """The counts under placement, eagerly."""
    lowering = PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)
    step(lowering, name, *ones(name))
    return lowering.costs


@pytest.mark.parametrize(("name", "rules"), [("dense", "x:a;h:b"), ("images", "r:a;c:b")])
def test_lowerings_and_graphs_count_the_same(name, rules):
    layout, found = LayoutRules.from_text(rules), []

    @tf.function(autograph=False)
    def graph():
        lowering = PlacementLowering(MESH, layout, DEVICES)
        found.append(lowering.costs)
        return step(lowering, name, *ones(name))

    def program(lowering, *arrays):
        found.append(lowering.costs)
        return step(lowering, name, *arrays)

    graph.get_concrete_function()
    cores = Cores(MESH, DEVICES)
    cores.function(program, layout, *map(tf.TensorSpec.from_tensor, ones(name)))
    cores.run_eagerly(program, layout, [ones(name)] * 4)
    assert len(found) == 6
    assert all(costs.work == counted(name, rules).work for costs in found)


@pytest.mark.parametrize(("name", "rules"), [(n, r) for n, some in RULES.items() for r in some])
def test_flops_of_products_are_those_of_tensorflow(name, rules):
    """Of gradients of convolutions TensorFlow counts padding too, so these are left out."""
    kinds = ("MatMul", "Conv2D", "Conv2DBackpropInput")
    with tf.Graph().as_default() as graph:
        lowering = TpuLowering(MESH, LayoutRules.from_text(rules), tf.constant(0))
        step(lowering, name, *ones(name), backward=name == "dense")
        registered = sum(
            int(framework.get_stats_for_node_def(graph, op.node_def, "flops").value or 0)
            for op in graph.get_operations()
            if op.type in kinds
        )
    products = [
        row[1] for key, row in lowering.costs.work.items() if key[1].startswith(("einsum", "conv"))
    ]
    assert sum(products) == registered > 0


@pytest.mark.parametrize("rules", RULES["dense"])
def test_all_devices_together_compute_the_whole(rules):
    """Flops that an axis divides, and those that it repeats, add up to the whole."""
    costs, whole = counted("dense", rules), counted("dense", "")
    by_operation = {}
    for (axes, operation, direction), (_, flops, _) in costs.work.items():
        number = flops * costs.mesh.without(*set(MESH.axis_names) - set(axes)).num_devices
        key = (operation, direction)
        by_operation[key] = by_operation.get(key, 0) + number
    for direction in ("forward", "backward"):
        expected = whole.work[(), "einsum", direction][1]
        assert by_operation["einsum", direction] == expected


def test_work_without_a_rule_is_the_same_everywhere():
    costs = counted("dense", "h:b")
    assert costs.same_flops("a") == costs.flops
    # Only the loss is not split over `b`.
    assert 0 < costs.same_flops("b") < 0.5 * costs.flops
    assert counted("dense", "x:a;h:b").same_flops("a") == 0
    with pytest.raises(MeshError, match="'c'"):
        costs.same_flops("c")


def test_gradients_of_products_are_as_many_flops_again():
    """Of each operand with a gradient: two of both convolutions but the first, one of that."""
    work = counted("images", "r:a;c:b").work
    for operation, gradients in (("conv2d", 1), ("conv_transpose", 2)):
        key = ("a", "b"), operation
        assert work[(*key, "backward")][1] == gradients * work[(*key, "forward")][1]


def test_bytes_are_those_of_operands_and_results():
    lowering = PlacementLowering(MESH, LayoutRules.from_text("x:a"), DEVICES)
    x = ops.import_tensor(lowering, tf.ones([4, 3]), "x:4;y:3")
    lowering.costs.clear()
    ops.transpose(ops.exp(x), ["y", "x"])
    assert lowering.costs.work == {
        (("a",), "exp", "forward"): (1, 6, 2 * 24),
        (("a",), "transpose", "forward"): (1, 0, 2 * 24),
    }


def test_a_loop_counts_its_body_as_often_as_it_runs():
    costs = OperationCosts(MESH)
    with costs.repeated(3):
        costs.add_work("einsum", ["b"], Work(flops=5, touched=7, gradients=2))
    key = (("b",), "einsum")
    assert costs.work == {(*key, "forward"): (3, 15, 21), (*key, "backward"): (3, 30, 42)}


def test_what_no_tape_sees_has_no_backward_pass():
    lowering = PlacementLowering(MESH, LayoutRules(), DEVICES)
    x = ops.import_tensor(lowering, tf.ones([4]), "x:4")
    with tf.GradientTape() as tape:
        tape.watch(x)
        ops.exp(ops.stop_gradient(x))
    ops.exp(x)
    found = {key[1:] for key in lowering.costs.work}
    assert found == {("stop_gradient", "forward"), ("exp", "forward")}
