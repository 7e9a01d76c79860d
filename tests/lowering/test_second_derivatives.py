"""Gradients of gradients equal those of plain TensorFlow under every layout, or are an error."""

import functools
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import GradientError
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent.circular import SimdPipeline
from tests.lowering.cases import ALL
from tests.lowering.cases.case import THIN_MESHES
from tests.pairwise import in_turn
from tests.warm import warm

MESH = Mesh.from_text("data:2;model:2")
DEVICES = [f"CPU:{i}" for i in range(4)]
# The first with rules has copies that differ in what they add; the last moves splits.
LAYOUTS = ["batch:model;io:data", "batch:data;hidden:model", "batch:model;v:data"]
SHAPES = {"x": "batch:4;io:2", "w": "io:2;hidden:6", "b": "hidden:6"}
_DRAW = np.random.default_rng(0)
ARRAYS = {
    name: _DRAW.standard_normal(sizes).astype(np.float32)
    for name, sizes in (("x", (4, 2)), ("w", (2, 6)), ("b", (6,)))
}


def meshed_loss(lowering, x, w, b):
    x, w, b = (
        ops.import_tensor(lowering, array, shape)
        for array, shape in zip((x, w, b), SHAPES.values(), strict=True)
    )
    hidden = ops.tanh(ops.einsum([x, w], ["batch", "hidden"]) + b)
    hidden = hidden * ops.cumsum(ops.shift(hidden, "batch", 1, wrap=True), "batch")
    # An exchange of splits, or a gather and a slice.
    hidden = ops.rename(ops.rename(hidden, {"batch": "u"}), {"hidden": "v"})
    return ops.export_tensor(ops.reduce_mean(ops.softmax(hidden, "v") * ops.reduce_max(hidden)))


def plain_loss(x, w, b):
    hidden = tf.tanh(x @ w + b)
    hidden = hidden * tf.cumsum(tf.roll(hidden, 1, 0), 0)
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


def of_a_function(loss, arrays):
    return by_tapes(tf.function(loss, autograph=False), arrays)


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
    "of a tf.function": of_a_function,
    "of the gradient of a tf.function": of_a_functions_gradient,
}


@functools.cache
def wanted():
    return [grad.numpy() for grad in by_tapes(plain_loss, list(map(tf.constant, ARRAYS.values())))]


def check(found):
    for got, want in zip(found, wanted(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("way", "rules"), in_turn(list(WAYS), LAYOUTS))
def test_under_placement_they_are_those_of_the_plain_program(way, rules):
    """In graphs they were None, and without one wrong where copies had different shares."""
    lowering = PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)
    arrays = [tf.constant(array) for array in ARRAYS.values()]
    check(WAYS[way](functools.partial(meshed_loss, lowering), arrays))


@pytest.mark.slow
def test_in_the_first_tensorflow_too():
    with tf.Graph().as_default():
        lowering = PlacementLowering(MESH, LayoutRules.from_text(LAYOUTS[0]), DEVICES)
        arrays = [tf.constant(array) for array in ARRAYS.values()]
        grads = by_tf_gradients(functools.partial(meshed_loss, lowering), arrays)
        with tf.compat.v1.Session() as session:
            check(session.run(grads))


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


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.sources])
def test_every_operation_has_those_of_plain_tensorflow(name):
    case, mesh = ALL[name], Mesh.from_text(THIN_MESHES[0])
    *_, cotangent = case.expected()
    arrays = [tf.constant(array) for array, _ in case.inputs]
    cotangent = tf.cast(cotangent, tf.float32)
    wanted = of_case(case.reference, case, arrays, cotangent)
    rules = case.thinned_layouts(str(mesh), 1)[0]
    lowering = PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(8)])

    def run(*arrays):
        tensors = [
            ops.import_tensor(lowering, array, shape)
            for array, (_, shape) in zip(arrays, case.inputs, strict=True)
        ]
        return ops.export_tensor(ops.transpose(case.call(lowering, *tensors), case.out))

    found = of_case(run, case, arrays, cotangent)
    if wanted is None:
        assert found is None
        return
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            near = 2e-3 * max(1e-3, np.abs(want[np.isfinite(want)]).max(initial=0))
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=near)


CORES = """
import functools
import tensorflow as tf
from pipemesh.lowering import Cores
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.mesh import LayoutRules
start_cpu_devices(4)
from tests.lowering.test_second_derivatives import *
cores = Cores(MESH, DEVICES)
arrays = [tf.constant(array) for array in ARRAYS.values()]
specs = [tf.TensorSpec.from_tensor(array) for array in arrays]
def program(by, lowering, *given):
    return by(functools.partial(meshed_loss, lowering), list(given))
for text, by in ((LAYOUTS[0], by_tapes), (LAYOUTS[2], by_tf_gradients)):
    rules = LayoutRules.from_text(text)
    for found in cores.function(functools.partial(program, by), rules, *specs)([arrays] * 4):
        check(found)
for found in cores.run_eagerly(functools.partial(program, by_tapes), rules, [arrays] * 4):
    check(found)
"""


@pytest.mark.slow
def test_in_the_program_of_a_core_they_are_the_same():
    done = subprocess.run(warm("-c", CORES), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


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


@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_has_first_derivatives_only(way):
    """Without a graph the second ones were parts of what they should be."""
    arrays = [tf.constant(ARRAYS["x"]), tf.ones([1, 2, 1, 2])]
    with pytest.raises(GradientError, match="second derivatives of a SimdPipeline do not exist"):
        WAYS[way](pipelined_loss, arrays)


def test_a_persistent_tape_may_ask_a_pipeline_in_a_function_for_its_gradient():
    x, w = tf.constant(ARRAYS["x"]), tf.ones([1, 2, 1, 2])
    function = tf.function(pipelined_loss, autograph=False)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        loss = function(x, w)
    found = [tape.gradient(loss, part).numpy() for part in (x, w)]
    np.testing.assert_allclose(found[0], ARRAYS["x"] / 4, rtol=1e-5)
    np.testing.assert_allclose(found[1][0, 0, 0], (ARRAYS["x"] ** 2).sum(0) / 4, rtol=1e-5)
