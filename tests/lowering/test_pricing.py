"""Prices of layout rules for programs; the network and its layouts are those of Mesh TensorFlow."""

import functools
import itertools

import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.lowering import PlacementLowering, ops, program_pricing
from pipemesh.mesh import LayoutRules, Mesh, find_layout
from pipemesh.plan import Link, Machine

MACHINE = Machine(flops=1e12, bandwidth=1e11, network=Link(1e-6, 1e10))
SHAPES = {
    "images": "batch:100;rows:28;cols:28",
    "labels": "batch:100",
    "w1": "rows:28;cols:28;hidden:1024",
    "w2": "hidden:1024;classes:10",
}
# Those that the README of Mesh TensorFlow gives.
LAYOUTS = {
    "all:4": ["", "batch:all", "hidden:all"],
    "processor_rows:2;processor_cols:2": ["batch:processor_rows;hidden:processor_cols"],
}


def mnist(images, labels, w1, w2):
    hidden = ops.relu(ops.einsum([images, w1], ["batch", "hidden"]))
    logits = ops.einsum([hidden, w2], ["batch", "classes"])
    right = ops.one_hot(labels, "classes:10") * ops.log_softmax(logits, "classes")
    return -ops.reduce_mean(ops.reduce_sum(right, "classes"))


@functools.cache
def pricing(mesh):
    return program_pricing(
        Mesh.from_text(mesh),
        mnist,
        SHAPES,
        MACHINE,
        trained=["w1", "w2"],
        dtypes={"labels": tf.int32},
    )


def placed(mesh, rules):
    """The counts of a step under placement."""
    mesh = Mesh.from_text(mesh)
    devices = ["CPU:0"] * mesh.num_devices
    lowering = PlacementLowering(mesh, LayoutRules.from_text(rules), devices)
    arrays = [tf.ones([100, 28, 28]), tf.ones([100], tf.int32)]
    arrays += [tf.ones([28, 28, 1024]), tf.ones([1024, 10])]
    tensors = [
        ops.import_tensor(lowering, array, shape)
        for array, shape in zip(arrays, SHAPES.values(), strict=True)
    ]
    lowering.costs.clear()
    with tf.GradientTape() as tape:
        tape.watch(tensors[2:])
        loss = mnist(*tensors)
    ops.gradients(loss, tensors[2:], tape)
    return lowering.costs


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_layouts_as_cheap_as_those_of_the_readme_are_found(mesh):
    program = pricing(mesh)
    found = find_layout(program)
    assert found.is_best
    for rules in LAYOUTS[mesh]:
        assert found.price.seconds <= program.price(LayoutRules.from_text(rules)).seconds


@pytest.mark.parametrize(
    ("mesh", "rules"), [(m, r) for m, layouts in LAYOUTS.items() for r in layouts]
)
def test_a_price_is_that_of_the_placed_program(mesh, rules):
    costs = placed(mesh, rules)
    price = pricing(mesh).price(LayoutRules.from_text(rules))
    assert price.parts == pytest.approx(MACHINE.parts(costs, Mesh.from_text(mesh)))
    assert price.seconds == pytest.approx(sum(price.parts.values()))


def test_no_layout_is_below_its_bound():
    program = pricing("processor_rows:2;processor_cols:2")
    dims = list(program.sizes)
    assert set(dims) == {"batch", "rows", "cols", "hidden", "classes"}
    for axes in itertools.product([None, "processor_cols"], repeat=len(dims)):
        decided = dict(zip(dims, axes, strict=True))
        try:
            price = program.price(LayoutRules(tuple((d, a) for d, a in decided.items() if a)))
        except LayoutError:
            continue
        assert program.least(decided).seconds <= price.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: ops.cumsum(x, "a"),
        lambda x: ops.concat([x, x], "a"),
        lambda x: ops.softmax(x, "a"),
        lambda x: ops.cast(ops.argmax(x, "a"), tf.float32),
    ],
    ids=["cumsum", "concat", "softmax", "argmax"],
)
def test_work_that_splits_add_is_not_in_the_bound(program):
    machine = Machine(1e12, bandwidth=1e9, network=Link(0.0, 1e15))
    priced = program_pricing(Mesh.from_text("m:2"), program, {"x": "a:8;b:8"}, machine)
    for rules in ("", "a:m", "b:m"):
        price = priced.price(LayoutRules.from_text(rules))
        decided = {dim: LayoutRules.from_text(rules).axis(dim) for dim in priced.sizes}
        assert priced.least(decided).seconds <= price.seconds * (1 + 1e-9)


def test_memory_is_that_of_weights_states_and_kept_values():
    """Hidden values are kept before and after `relu`, or its results alone."""
    price = pricing("all:4").price(LayoutRules.from_text("hidden:all"))
    weights = (28 * 28 + 10) * 1024 * 4 // 4
    inputs = 100 * (28 * 28 + 1) * 4
    hidden, logits = 100 * 1024 * 4 // 4, 100 * 10 * 4
    kept = price.memory - inputs - 4 * weights
    assert hidden <= kept <= 2 * hidden + 10 * logits


def test_a_limit_of_memory_splits_weights():
    program = pricing("all:4")
    limit = program.price(LayoutRules.from_text("hidden:all")).memory
    assert program.price(LayoutRules.from_text("batch:all")).memory > limit
    tight = find_layout(program, memory=limit)
    assert tight.price.memory <= limit
    assert tight.rules.axis("hidden") == "all"


def test_an_unknown_input_is_an_error():
    with pytest.raises(ShapeError, match="no input 'w3'; known: 'images'"):
        program_pricing(Mesh.from_text("all:4"), mnist, SHAPES, MACHINE, trained=["w3"])
