"""Gradients of a program on named dims are those of plain TensorFlow, however they are asked."""

import functools
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import GradientError
from pipemesh.lowering import PlacementLowering, SimdLowering, Tensor, ops
from pipemesh.lowering.variable import Constant, Variable
from pipemesh.mesh import LayoutRules, Mesh
from tests.warm import warm

MESH = Mesh.from_text("data:2;model:2")
DEVICES = [f"CPU:{i}" for i in range(4)]
LAYOUTS = ["", "batch:data", "hidden:model", "batch:data;hidden:model", "batch:model;io:data"]
SHAPES = {"x": "batch:4;io:2", "w": "io:2;hidden:6", "b": "hidden:6"}
_DRAW = np.random.default_rng(0)
ARRAYS = {
    "x": _DRAW.standard_normal((4, 2)).astype(np.float32),
    "w": _DRAW.standard_normal((2, 6)).astype(np.float32),
    "b": _DRAW.standard_normal(6).astype(np.float32),
}


def loss_of(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
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


def check(found):
    assert set(found) == set(ARRAYS)
    for name, grad in found.items():
        np.testing.assert_allclose(grad, wanted()[name], rtol=1e-4, atol=1e-6)


def with_ops(loss, tensors, tape):
    return ops.gradients(loss, tensors, tape)


def with_the_tape(loss, tensors, tape):
    return tape.gradient(loss, tensors)


def differentiated(rules, ask):
    lowering = PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)
    tensors = imported(lowering)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = loss_of(**tensors)
    grads = ask(loss, tensors, tape)
    for name, grad in grads.items():
        assert (grad.shape, grad.layout) == (tensors[name].shape, tensors[name].layout)
    return {name: ops.export_tensor(grad) for name, grad in grads.items()}


@pytest.mark.parametrize("ask", [with_ops, with_the_tape])
@pytest.mark.parametrize("rules", LAYOUTS)
def test_under_placement_they_are_tensors_like_the_sources(rules, ask):
    check(differentiated(rules, ask))
    check(tf.function(lambda: differentiated(rules, ask), autograph=False)())


@pytest.mark.parametrize("rules", LAYOUTS)
def test_graphs_need_no_tape(rules):
    def run():
        lowering = PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)
        tensors = imported(lowering)
        grads = ops.gradients(loss_of(**tensors), tensors)
        return {name: ops.export_tensor(grad) for name, grad in grads.items()}

    check(tf.function(run, autograph=False)())
    with tf.Graph().as_default():
        grads = run()
        with tf.compat.v1.Session() as session:
            check(session.run(grads))


def test_one_slice_of_the_loss_has_a_part_of_the_gradient_only():
    """What users did before there was a way to ask: it depended on the lowering."""
    lowering = PlacementLowering(MESH, LayoutRules.from_text("batch:data"), DEVICES)
    w = ops.import_tensor(lowering, ARRAYS["w"], SHAPES["w"])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(w)
        tensors = imported(lowering) | {"w": w}
        loss = loss_of(**tensors)
    partial = tape.gradient(loss.slices[0], w).numpy()
    assert np.abs(partial - wanted()["w"]).max() > 1e-3
    np.testing.assert_allclose(ops.gradients(loss, w, tape).numpy(), wanted()["w"], rtol=1e-4)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("rules", LAYOUTS)
def test_variables_and_whole_tensors_are_sources_too(rules, in_graph):
    rules = LayoutRules.from_text(rules)
    lowering = PlacementLowering(MESH, rules, DEVICES)
    layout = rules.tensor_layout(imported(lowering)["w"].shape, MESH)
    w = Variable.create("w", layout, DEVICES, Constant(0.0))
    for part, ranges in zip(w.variables, map(layout.slice_ranges, range(4)), strict=True):
        part.assign(ARRAYS["w"][ranges])
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


def test_a_lookup_has_a_dense_gradient_and_what_is_not_used_has_none():
    lowering = PlacementLowering(MESH, LayoutRules.from_text("vocab:model"), DEVICES)
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, tape: ops.gradients(x, x), "need the tape"),
        (lambda x, tape: ops.gradients(ops.cast(x, tf.int32), x, tape), "the loss is"),
        (lambda x, tape: ops.gradients(x.slices[0], x, tape), "the loss is"),
        (lambda x, tape: ops.gradients(x, ops.cast(x, tf.int32), tape), "no gradient; sources"),
        (lambda x, tape: ops.gradients(x, ["w"], tape), "'w' has no gradient"),
    ],
)
def test_what_has_no_gradient_is_named(call, message):
    lowering = PlacementLowering(MESH, LayoutRules(), DEVICES)
    with tf.GradientTape() as tape:
        x = ops.import_tensor(lowering, tf.ones([2]), "io:2")
    with pytest.raises(GradientError, match=message):
        call(x, tape)


def test_a_core_has_one_slice_of_a_variable():
    layout = LayoutRules().tensor_layout(imported(_placement())["w"].shape, MESH)
    w = Variable.create("w", layout, DEVICES, Constant(0.0))
    lowering = SimdLowering(Mesh.from_text("data:1"), LayoutRules(), None, tf.constant(0))
    with tf.GradientTape() as tape:
        loss = ops.reduce_sum(ops.import_tensor(lowering, tf.ones([2]), "io:2"))
    with pytest.raises(GradientError, match="has 4 slices in this process"):
        ops.gradients(loss, w, tape)


def _placement():
    return PlacementLowering(MESH, LayoutRules(), DEVICES)


CORES = """
import sys
import numpy as np
import tensorflow as tf
from pipemesh.lowering import Cores, ops
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.mesh import LayoutRules
start_cpu_devices(4)
from tests.lowering.test_differentiate import *
cores = Cores(MESH, DEVICES)
whole = [tf.constant(array) for array in ARRAYS.values()]
def program(ask, lowering, *arrays):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        tensors = dict(zip(ARRAYS, map(ops.import_tensor, [lowering] * 3, arrays, SHAPES.values())))
        tape.watch(tensors)
        loss = loss_of(**tensors)
    return ask(loss, tensors, tape)
def exported(ask, lowering, *arrays):
    grads = program(ask, lowering, *arrays)
    return {name: ops.export_tensor(grad) for name, grad in grads.items()}
for ask in (with_ops, with_the_tape, lambda loss, tensors, tape: ops.gradients(loss, tensors)):
    for text in LAYOUTS:
        rules = LayoutRules.from_text(text)
        specs = [tf.TensorSpec.from_tensor(array) for array in whole]
        run = cores.function(functools.partial(exported, ask), rules, *specs)
        for found in run([whole] * 4):
            check(found)
for text in LAYOUTS:
    args = [functools.partial(exported, with_ops), LayoutRules.from_text(text), [whole] * 4]
    for found in cores.run_eagerly(*args):
        check(found)
"""


@pytest.mark.slow
def test_in_the_program_of_a_core_they_are_the_same():
    done = subprocess.run(warm("-c", CORES), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
