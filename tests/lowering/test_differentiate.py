"""First and second gradients of programs on named dims are those of plain TensorFlow."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import GradientError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.lowering.tensor import Tensor
from pipemesh.lowering.variable import Constant, Variable
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.recurrent.circular import SimdPipeline
from tests.lowering.cases import ALL
from tests.lowering.cases.case import LARGE_MESH, not_thin
from tests.pairwise import in_turn

MESH = Mesh.from_text("data:2;model:2")
DEVICES = [f"CPU:{i}" for i in range(4)]
LAYOUTS = ["", "batch:data;hidden:model", "batch:model;io:data"]
SHAPES = {"x": "batch:4;io:2", "w": "io:2;hidden:6", "b": "hidden:6"}
_DRAW = np.random.default_rng(0)
ARRAYS = {
    name: _DRAW.standard_normal(Shape.from_text(shape).sizes).astype(np.float32)
    for name, shape in SHAPES.items()
}


def loss_of(x, w, b):
    hidden = ops.tanh(ops.einsum([x, w], ["batch", "hidden"]) + b)
    return ops.reduce_mean(ops.softmax(hidden, "hidden") * hidden)


@functools.cache
def wanted():
    arrays = {name: tf.constant(array) for name, array in ARRAYS.items()}
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        hidden = tf.tanh(arrays["x"] @ arrays["w"] + arrays["b"])
        loss = tf.reduce_mean(tf.nn.softmax(hidden) * hidden)
    return {name: grad.numpy() for name, grad in tape.gradient(loss, arrays).items()}


def imported(lowering):
    return {
        name: ops.import_tensor(lowering, tf.constant(array), SHAPES[name])
        for name, array in ARRAYS.items()
    }


def check(grads):
    assert set(grads) == set(ARRAYS)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted()[name], rtol=1e-4, atol=1e-6)


def make(rules):
    return PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)


ASKS = {
    "ops.gradients": ops.gradients,
    "the tape": lambda loss, tensors, tape: tape.gradient(loss, tensors),
    "no tape": lambda loss, tensors, tape: ops.gradients(loss, tensors),
}


def differentiated(lowering, ask):
    tensors = imported(lowering)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = loss_of(**tensors)
    grads = ASKS[ask](loss, tensors, tape)
    for name, grad in grads.items():
        assert (grad.shape, grad.layout) == (tensors[name].shape, tensors[name].layout)
    return {name: ops.export_tensor(grad) for name, grad in grads.items()}


@pytest.mark.parametrize(("rules", "ask"), in_turn(LAYOUTS, list(ASKS)))
def test_under_placement_they_are_tensors_like_the_sources(rules, ask):
    if ask != "no tape":
        check(differentiated(make(rules), ask))
    check(tf.function(lambda: differentiated(make(rules), ask), autograph=False)())


def test_a_graph_of_tensorflow_1_needs_no_tape():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        check(session.run(differentiated(make(LAYOUTS[1]), "no tape")))


def test_one_slice_of_the_loss_has_a_part_of_the_gradient_only():
    """It was the only way once, and depended on the lowering."""
    lowering = make("batch:data")
    w = ops.import_tensor(lowering, ARRAYS["w"], SHAPES["w"])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(w)
        tensors = imported(lowering) | {"w": w}
        loss = loss_of(**tensors)
    partial = tape.gradient(loss.slices[0], w).numpy()
    assert np.abs(partial - wanted()["w"]).max() > 1e-3
    np.testing.assert_allclose(ops.gradients(loss, w, tape).numpy(), wanted()["w"], rtol=1e-4)


@pytest.mark.parametrize(("rules", "in_graph"), in_turn(LAYOUTS, [False, True]))
def test_variables_and_whole_tensors_are_sources_too(rules, in_graph):
    lowering = make(rules)
    layout = lowering.tensor_layout(Shape.from_text(SHAPES["w"]))
    w = Variable.create("w", layout, DEVICES, Constant(0.0))
    w.assign(ARRAYS["w"])
    b, x = tf.Variable(ARRAYS["b"]), tf.constant(ARRAYS["x"])

    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(
                ops.import_tensor(lowering, x, SHAPES["x"]),
                w.tensor(lowering),
                ops.import_tensor(lowering, b, SHAPES["b"]),
            )
        grads = ops.gradients(loss, {"x": x, "more": [w, b]}, tape)
        assert grads["more"][0].layout == layout
        return {"x": grads["x"], "w": ops.export_tensor(grads["more"][0]), "b": grads["more"][1]}

    check(tf.function(run, autograph=False)() if in_graph else run())


def test_lookup_has_a_dense_gradient_unused_source_none():
    lowering = make("vocab:model")
    table = ops.import_tensor(lowering, tf.ones([6, 2]), "vocab:6;io:2")
    other = ops.import_tensor(lowering, tf.ones([6]), "vocab:6")
    ids = ops.import_tensor(lowering, tf.constant([5, 5, 0]), "batch:3")
    with tf.GradientTape() as tape:
        tape.watch([table, other])
        rows = ops.gather(table, ids, "vocab")
    found, nothing = ops.gradients(rows, [table, other], tape)
    want = np.zeros([6, 2])
    want[0], want[5] = 1, 2
    np.testing.assert_array_equal(found.numpy(), want)
    assert nothing is None


def test_the_gradient_of_a_slice_of_a_table_may_be_a_row_for_each_index():
    """It was a whole table for each microbatch, next to the sum."""
    lowering = PlacementLowering(Mesh.from_text("model:1"), LayoutRules(), DEVICES[:1])
    with tf.Graph().as_default():
        table = tf.compat.v1.placeholder(tf.float32, [6, 2])
        ids = ops.import_tensor(lowering, tf.constant([5, 5, 0]), "batch:3")
        named = Tensor(lowering, (table,), Shape.from_text("vocab:6;io:2"))
        grads = [
            tf.gradients(ops.gather(named, ids, "vocab", sparse=sparse).slices, [table])[0]
            for sparse in (True, False)
        ]
    assert isinstance(grads[0], tf.IndexedSlices) and grads[0].values.shape == [3, 2]
    assert isinstance(grads[1], tf.Tensor)


# The first has copies that differ in what they add; the last moves splits.
SECOND_LAYOUTS = ["batch:model;io:data", "batch:data;hidden:model", "batch:model;v:data"]


def meshed_loss(lowering, x, w, b):
    x, w, b = (
        ops.import_tensor(lowering, array, shape)
        for array, shape in zip((x, w, b), SHAPES.values(), strict=True)
    )
    hidden = ops.tanh(ops.einsum([x, w], ["batch", "hidden"]) + b)
    # An exchange of splits, or a gather and a slice.
    hidden = ops.rename(ops.rename(hidden, {"batch": "u"}), {"hidden": "v"})
    return ops.export_tensor(ops.reduce_mean(ops.softmax(hidden, "v") * ops.reduce_max(hidden)))


def plain_loss(x, w, b):
    hidden = tf.tanh(x @ w + b)
    return tf.reduce_mean(tf.nn.softmax(hidden) * tf.reduce_max(hidden))


def score(grads):
    """Depends on all gradients, and on each in another way."""
    return tf.add_n([tf.reduce_sum(tf.sin(3.0 * grad)) for grad in grads])


def first(loss, arrays):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        value = loss(*arrays)
    return tape.gradient(value, arrays)


def by_tapes(loss, arrays):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        value = score(first(loss, arrays))
    return tape.gradient(value, arrays)


def by_one_tape(loss, arrays):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(arrays)
        value = score(tape.gradient(loss(*arrays), arrays))
    return tape.gradient(value, arrays)


def by_tf_gradients(loss, arrays):
    return tf.gradients(score(tf.gradients(loss(*arrays), arrays)), arrays)


def in_graph(by):
    def run(loss, arrays):
        return tf.function(lambda *given: by(loss, list(given)), autograph=False)(*arrays)

    return run


def of_a_functions_gradient(loss, arrays):
    grads = tf.function(lambda *given: first(loss, list(given)), autograph=False)
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        value = score(grads(*arrays))
    return tape.gradient(value, arrays)


WAYS = {
    "tapes": by_tapes,
    "one tape": by_one_tape,
    "tapes in a graph": in_graph(by_tapes),
    "one tape in a graph": in_graph(by_one_tape),
    "tf.gradients": in_graph(by_tf_gradients),
    "of a tf.function": lambda loss, arrays: by_tapes(tf.function(loss, autograph=False), arrays),
    "of the gradient of a tf.function": of_a_functions_gradient,
}


@functools.cache
def second_wanted():
    return [grad.numpy() for grad in by_tapes(plain_loss, list(map(tf.constant, ARRAYS.values())))]


def check_second(grads):
    for got, want in zip(grads, second_wanted(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("way", "rules"), in_turn(list(WAYS), SECOND_LAYOUTS))
def test_second_gradients_are_those_of_the_plain_program(way, rules):
    """In graphs they were None, and without one wrong where copies had different shares."""
    arrays = [tf.constant(array) for array in ARRAYS.values()]
    check_second(WAYS[way](functools.partial(meshed_loss, make(rules)), arrays))


@pytest.mark.slow
def test_second_gradients_in_a_tf1_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        arrays = [tf.constant(array) for array in ARRAYS.values()]
        loss = functools.partial(meshed_loss, make(SECOND_LAYOUTS[0]))
        check_second(session.run(by_tf_gradients(loss, arrays)))


def of_case(run, case, arrays, cotangent):
    """Second derivatives of a score of what `run` returns; None if it has no first ones."""
    sources = [arrays[i] for i in case.sources]
    with tf.GradientTape() as outer:
        outer.watch(sources)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = run(*arrays)
            loss = tf.reduce_sum(tf.sin(tf.cast(value, tf.float32)) * cotangent)
        grads = [grad for grad in tape.gradient(loss, sources) if grad is not None]
        if not grads:
            return None
        total = score([tf.cast(tf.convert_to_tensor(grad), tf.float32) for grad in grads])
    found = outer.gradient(total, sources)
    return [None if grad is None else tf.convert_to_tensor(grad).numpy() for grad in found]


@pytest.mark.parametrize(
    "name",
    not_thin({name: case for name, case in ALL.items() if case.sources}),
)
def test_second_gradients_of_every_operation(name):
    case, mesh = ALL[name], Mesh.from_text(LARGE_MESH)
    *_, cotangent = case.expected
    arrays = [tf.constant(array) for array, _ in case.inputs]
    cotangent = tf.cast(cotangent, tf.float32)
    wanted = of_case(case.reference, case, arrays, cotangent)
    rules = case.layouts(LARGE_MESH)[0]
    lowering = PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(8)])

    def run(*arrays):
        return case.value(lowering, arrays)

    found = of_case(run, case, arrays, cotangent)
    if wanted is None:
        assert found is None
        return
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            near = 2e-3 * max(1e-3, np.abs(want[np.isfinite(want)]).max(initial=0))
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=near)


def test_gradients_are_the_same_in_the_program_of_a_core():
    cores = Cores(MESH, DEVICES)
    arrays = [tf.constant(array) for array in ARRAYS.values()]

    def of_cores(program, rules, in_graph=True):
        rules = LayoutRules.from_text(rules)
        if not in_graph:
            return cores.run_eagerly(program, rules, [arrays] * 4)
        specs = [tf.TensorSpec.from_tensor(array) for array in arrays]
        return cores.function(program, rules, *specs)([arrays] * 4)

    for rules, ask in zip(LAYOUTS, ASKS, strict=True):
        for grads in of_cores(lambda low, *_, ask=ask: differentiated(low, ask), rules):
            check(grads)
    for grads in of_cores(lambda low, *_: differentiated(low, "the tape"), LAYOUTS[1], False):
        check(grads)
    for by, rules, in_graph in (
        (by_tapes, SECOND_LAYOUTS[0], True),
        (by_tf_gradients, SECOND_LAYOUTS[2], True),
        (by_tapes, SECOND_LAYOUTS[2], False),
    ):

        def second(lowering, *arrays, by=by):
            return by(functools.partial(meshed_loss, lowering), list(arrays))

        for grads in of_cores(second, rules, in_graph):
            check_second(grads)


def pipelined_loss(x, w):
    lowering = PlacementLowering(
        Mesh.from_text("layers:2"), LayoutRules.from_text("layers:layers"), DEVICES[:2]
    )
    pipeline = SimdPipeline(lowering.mesh, num_layers=2, num_microbatches=2)
    weights = {"w": ops.import_tensor(lowering, w, pipeline.stacked("io:2"))}
    y = pipeline(
        lambda x, w, _: x * w["w"], ops.import_tensor(lowering, x, "batch:4;io:2"), weights
    )
    return ops.export_tensor(ops.reduce_mean(ops.square(y)))


@pytest.mark.parametrize(
    "way", ["tapes", "tapes in a graph", "tf.gradients", "of the gradient of a tf.function"]
)
def test_a_pipeline_has_first_derivatives_only(way):
    """Without a graph the second ones were parts of what they should be."""
    arrays = [tf.constant(ARRAYS["x"]), tf.ones([1, 2, 1, 2])]
    with pytest.raises(GradientError, match="second derivatives of a SimdPipeline do not exist"):
        WAYS[way](pipelined_loss, arrays)


def test_persistent_tape_around_a_pipeline_in_a_function():
    x, w = tf.constant(ARRAYS["x"]), tf.ones([1, 2, 1, 2])
    function = tf.function(pipelined_loss, autograph=False)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        loss = function(x, w)
    found = [tape.gradient(loss, part).numpy() for part in (x, w)]
    np.testing.assert_allclose(found[0], ARRAYS["x"] / 4, rtol=1e-5)
    np.testing.assert_allclose(found[1][0, 0, 0], (ARRAYS["x"] ** 2).sum(0) / 4, rtol=1e-5)
