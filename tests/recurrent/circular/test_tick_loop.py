"""The loop over ticks does what the table says, and how it sums gradients."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent.circular import SimdPipeline
from pipemesh.recurrent.circular.tick_loop import TickLoop
from pipemesh.schedule import looped_bfs
from pipemesh.schedule.simulate import lockstep

LOWERING = PlacementLowering(
    Mesh.from_text("layers:2"), LayoutRules.from_text("layers:layers"), ["CPU:0", "CPU:1"]
)


def gradients(layer, x, weights, cotangent):
    """Of weights; those with two elements are a number for each of two layers."""
    pipeline = SimdPipeline(LOWERING.mesh, num_layers=2, num_microbatches=len(x))

    @tf.function(autograph=False)
    def step(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            tensors = {}
            for name, value in weights.items():
                own = value.shape.num_elements() == 2
                shape = pipeline.stacked("") if own else ""
                value = tf.reshape(value, [1, 2, 1]) if own else value
                tensors[name] = ops.import_tensor(LOWERING, value, shape)
            y = pipeline(layer, ops.import_tensor(LOWERING, x, f"batch:{x.shape[0]}"), tensors)
            y = ops.export_tensor(y)
        return tape.gradient(y, weights, cotangent, tf.UnconnectedGradients.ZERO)

    return tf.nest.map_structure(lambda t: t.numpy().tolist(), step(x, weights))


def test_many_small_gradients_of_bfloat16_are_not_lost():
    ones = tf.ones([8], tf.bfloat16)
    cotangent = tf.constant([1, 1, 1, 1, 1, 1, 1, 256], tf.bfloat16)
    weights = {"w": tf.zeros([2], tf.bfloat16)}
    got = gradients(lambda x, w, _: x + w["w"], ones, weights, cotangent)
    # 263, rounded once; in bfloat16 256 + 1 is 256.
    assert got == {"w": [264, 264]}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("shared", [2.0, [2.0, 2.0]])
def test_a_shared_weight_gets_the_gradients_of_all_layers(shared, eager, monkeypatch):
    if eager:
        monkeypatch.setattr(tf, "function", lambda **_: lambda function: function)
    x = tf.constant([1.0, 3.0])
    weights = {"w": tf.constant(shared)}
    got = gradients(lambda x, w, _: x * w["w"], x, weights, tf.ones([2]))
    each = 2.0 * 4.0
    assert got == {"w": 2 * each if shared == 2.0 else [each, each]}


def test_a_weight_that_is_not_used_has_no_gradient():
    weights = {"w": tf.constant([1.0, 2.0]), "unused": tf.constant([1.0, 1.0])}
    got = gradients(lambda x, w, _: x * w["w"], tf.ones([2]), weights, tf.ones([2]))
    assert got == {"w": [4.0, 2.0], "unused": [0.0, 0.0]}


def test_a_weight_is_told_apart_where_it_meets_examples_and_where_not():
    mesh = Mesh.from_text("layers:2;data:2")
    rules = LayoutRules.from_text("layers:layers;batch:data")
    lowering = PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(4)])
    pipeline = SimdPipeline(mesh, num_layers=2, num_microbatches=2)

    def layer(x, w, position):
        # A normed weight: its norm is equal along `data`, where the examples differ.
        return x * w["w"] / ops.sqrt(ops.reduce_sum(ops.square(w["w"]), "io"))

    def run(x, w):
        y = pipeline(
            layer,
            ops.import_tensor(lowering, x, "batch:8;io:3"),
            {"w": ops.import_tensor(lowering, w, pipeline.stacked("io:3"))},
        )
        return ops.export_tensor(y)

    draw = np.random.default_rng(0)
    x, cotangent = draw.standard_normal((2, 8, 3)).astype(np.float32)
    w = tf.constant(draw.standard_normal((1, 2, 1, 3)).astype(np.float32))

    @tf.function(autograph=False)
    def got():
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = run(tf.constant(x), w)
        return tape.gradient(y, w, cotangent)

    with tf.GradientTape() as tape:
        tape.watch(w)
        y = x
        for i in range(2):
            part = w[0, i, 0]
            y = y * part / tf.norm(part)
    np.testing.assert_allclose(got(), tape.gradient(y, w, cotangent), rtol=1e-4, atol=1e-5)


class Recorder:
    """Multiplies by 2, and notes what each core does at each tick."""

    def __init__(self):
        self.ticks = []

    def note(self, kind, now):
        self.ticks.append(
            [
                f"{int(stage)}{kind}{int(m)}" if busy else None
                for stage, m, busy in zip(now.stages, now.microbatches, now.busy, strict=True)
            ]
        )

    def forward(self, now, x, weights):
        self.note("F", now)
        return (tuple(2.0 * part for part in x[0]),)

    def zero_sums(self, weights):
        return ()

    def backward(self, now, x, weights, grad_y, sums):
        self.note("B", now)
        return (tuple(2.0 * part for part in grad_y[0]),), ()


@pytest.mark.parametrize(
    "sizes", [(1, 3, 2), (2, 3, 1), (2, 3, 2), (3, 2, 2), (4, 1, 2), (2, 4, 3)]
)
def test_the_loop_does_what_the_table_says(sizes):
    num_cores, num_microbatches, _ = sizes
    schedule = looped_bfs(*sizes)
    mesh = Mesh.from_text(f"layers:{num_cores}")
    lowering = PlacementLowering(mesh, LayoutRules(), ["CPU:0"] * num_cores)
    stage = Recorder()
    loop = TickLoop(schedule, lowering, stage)
    x = tf.range(1.0, num_microbatches + 1)[:, None]
    (outputs,), saved = loop.forward(((x,) * num_cores,), [])
    np.testing.assert_array_equal(outputs[0], x * 2.0**schedule.num_stages)
    (grads,), _ = loop.backward(((x,) * num_cores,), saved, [])
    np.testing.assert_array_equal(grads[0], x * 2.0**schedule.num_stages)
    table = lockstep(schedule)
    did = [tuple(core) for core in zip(*stage.ticks, strict=True)]
    assert did == [tuple(action and str(action) for action in row) for row in table]
