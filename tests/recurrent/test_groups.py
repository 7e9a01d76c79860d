"""Stages whose replicas have several devices, among which they divide their work themselves."""

import collections
import re

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError, PipelineError
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.recurrent import (
    Home,
    Options,
    Stage,
    pipeline_loss,
    predict_memory,
    predict_transfers,
)
from pipemesh.recurrent.stage import current_devices
from pipemesh.schedule import one_f_one_b, zb_h1
from tests.recurrent.sends import sends, trained

BATCH, WIDTH, HIDDEN = 16, 6, 8


def weights(seed):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=shape).astype(np.float32) / 3
        for shape in ([WIDTH, HIDDEN], [HIDDEN, WIDTH], [WIDTH])
    ]


def layer(lowering, x, theta):
    """`x + tanh(x @ wi) @ wo * scale`, with `wi` and `wo` cut over two devices."""
    wi, wo, scale = (
        Tensor(lowering, tuple(slices), Shape.from_text(text))
        for slices, text in zip(
            (theta[0:2], theta[2:4], theta[4:6]),
            (f"io:{WIDTH};hidden:{HIDDEN}", f"hidden:{HIDDEN};io:{WIDTH}", f"io:{WIDTH}"),
            strict=True,
        )
    )
    hidden = ops.tanh(ops.einsum([x, wi], ["batch", "hidden"]))
    return x + ops.einsum([hidden, wo], ["batch", "io"]) * scale


def stage_function(is_first, is_last):
    """Between stages, activations lie on both devices; what comes in and goes out on the first."""

    def forward(theta, carry, inputs, microbatch, step):
        mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("hidden:model")
        lowering = PlacementLowering(mesh, rules, current_devices())
        shape = Shape.of(batch=inputs[0].shape[0], io=WIDTH)
        if is_first:
            x = ops.import_tensor(lowering, inputs[0], shape)
        else:
            x = Tensor(lowering, tuple(inputs), shape)
        y = layer(lowering, x, theta)
        if is_last:
            return [tf.reduce_sum(ops.export_tensor(y) ** 2)], carry
        return list(y.slices), carry

    return forward


def plain(x, layers):
    for wi, wo, scale in layers:
        x = x + (tf.tanh(x @ wi) @ wo) * scale
    return tf.reduce_sum(x**2)


def cut(own):
    """The slices of a layer's weights, and a copy of what is not cut."""
    wi, wo, scale = map(tf.convert_to_tensor, own)
    return [*tf.split(wi, 2, axis=1), *tf.split(wo, 2, axis=0), scale, tf.identity(scale)]


PLACES = [0, 1, 0, 1, 0, 1]
FLOAT = tf.float32.as_datatype_enum


def stages_of(schedule, variables, replicas=1):
    size, last = 2 * replicas, schedule.num_stages - 1

    def stage(number, own):
        devices = tuple(f"CPU:{number * size + i}" for i in range(size))
        return Stage(
            f"s{number}",
            stage_function(number == 0, number == last),
            cut(own),
            [],
            Home(devices, replicas),
            places=PLACES,
            copies={5: 4},
        )

    return [stage(*pair) for pair in enumerate(variables)]


# Pipelines of layers with named dims, in `tests/layers/named`, meet more schedules.
@pytest.mark.parametrize(
    ("schedule", "replicas", "remat", "loop"),
    [(one_f_one_b(2, 4), 2, "full", False), (zb_h1(2, 4), 1, "none", True)],
)
def test_slices_of_weights_and_activations_equal_the_plain_model(schedule, replicas, remat, loop):
    variables = [[tf.Variable(w) for w in weights(i)] for i in range(2)]
    x = tf.constant(np.random.default_rng(9).normal(size=[BATCH, WIDTH]), tf.float32)

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            found, _, _ = pipeline_loss(
                stages_of(schedule, variables, replicas),
                [x],
                schedule,
                options=Options(remat=remat, loop=loop, strict_devices=True),
            )
        return found, tape.gradient(found, [x, variables])

    with tf.GradientTape() as tape:
        tape.watch(x)
        wanted = plain(x, variables)
    grads = tape.gradient(wanted, [x, variables])
    found, found_grads = run()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for a, b in zip(tf.nest.flatten(found_grads), tf.nest.flatten(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def floats_sent(schedule, replicas, **options):
    """How often a step sends floating tensors, by the numbers of the devices."""
    stages = stages_of(schedule, [weights(i) for i in range(schedule.num_stages)], replicas)
    run = trained(stages, [tf.ones([BATCH, WIDTH])], schedule, **options)
    return collections.Counter((a, b) for _, dtype, a, b in sends(run) if dtype == FLOAT)


def test_slices_go_from_slice_to_slice_and_weights_once_a_step():
    counts = floats_sent(one_f_one_b(2, 4), 2)
    # Homes of four devices, replicas of two.
    between = {pair: n for pair, n in counts.items() if pair[0] // 4 != pair[1] // 4}
    assert between == {(p, p + 4): 4 for p in range(4)} | {(p + 4, p): 4 for p in range(4)}
    # Slices of `wi` and `wo`, and the whole `scale`, which has one gradient.
    apart = {p: n for p, n in counts.items() if p[0] // 4 == p[1] // 4 and p[0] // 2 != p[1] // 2}
    # And of each microbatch the inputs of the second replica, and its loss.
    ends = {(0, 2): 4, (6, 4): 4}
    assert {pair: n - ends.get(pair, 0) for pair, n in apart.items()} == {
        **{(p, p + 2): 3 for p in (0, 1, 4, 5)},
        **{(2, 0): 3, (3, 1): 2, (6, 4): 3, (7, 5): 2},
    }


@pytest.mark.parametrize(
    ("schedule", "remat"), [(one_f_one_b(2, 4), "none"), (zb_h1(2, 4), "full")]
)
def test_no_needless_transfers_inside_a_replica(schedule, remat):
    part = BATCH // 4 * WIDTH * 4
    with tf.Graph().as_default():
        stages = stages_of(schedule, [weights(i) for i in range(2)])
        found = predict_transfers(
            stages, [tf.ones([BATCH, WIDTH])], schedule, options=Options(remat=remat)
        )
    inside = {
        (int(t.source[-1]), int(t.target[-1])): t.bytes / part
        for t in found
        if t.what == "inside a stage"
    }
    # Of each microbatch: the sum of products there and back, forward; backward that of gradients;
    # and what is computed again.
    if remat == "none":
        assert inside[0, 1] == 4 * 2 and inside[1, 0] == 4
    counts = floats_sent(schedule, 1, remat=remat)
    # What is sent is what is predicted: all tensors are of one size.
    assert {p: n for p, n in counts.items() if p[0] // 2 == p[1] // 2} == inside


def test_predicted_memory_and_transfers_know_slices():
    schedule = one_f_one_b(2, 4)
    variables = [weights(i) for i in range(2)]
    with tf.Graph().as_default():
        stages = stages_of(schedule, variables, replicas=2)
        arguments = stages, [tf.ones([BATCH, WIDTH])], schedule
        memory = predict_memory(*arguments)
        found = {
            (t.what, t.source, t.target): (t.times, t.bytes) for t in predict_transfers(*arguments)
        }
    half, scale = 2 * WIDTH * HIDDEN // 2 * 4, WIDTH * 4
    assert [device.weights for device in memory] == [half + scale] * 8
    assert [device.gradients for device in memory] == [half + scale, half] * 4
    assert found["weights", "CPU:0", "CPU:2"] == (1, half + scale)
    assert found["weights", "CPU:0", "CPU:1"] == (1, scale)
    assert found["weight gradients", "CPU:3", "CPU:1"] == (1, half)
    part = BATCH // 4 // 2 * WIDTH * 4
    assert found["activations", "CPU:3", "CPU:7"] == (4, 4 * part)
    assert found["gradients", "CPU:7", "CPU:3"] == (4, 4 * part)


@pytest.mark.parametrize("places", [[0, 1, 2], [0]])
def test_a_weight_lies_on_a_device_of_the_home(places):
    text = rf"3 weights and the places {re.escape(str(places))}.* from 0 to 1"
    with pytest.raises(PipelineError, match=text):
        Stage("s", None, [tf.zeros([])] * 3, [], Home(("CPU:0", "CPU:1"), 1), places=places)


def test_devices_divide_among_replicas():
    with pytest.raises(
        DeviceError, match=r"3 devices .* and 2 replicas; give each replica as many"
    ):
        Home(("CPU:0", "CPU:1", "CPU:2"), 2)
