"""What a tick computes of layers with named dims, against the same layers in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape
from pipemesh.recurrent.circular.named_stage import LoopWeight, NamedStage
from pipemesh.recurrent.circular.tick_loop import Tick

LOWERING = PlacementLowering(
    Mesh.from_text("data:2"), LayoutRules.from_text("batch:data"), ["CPU:0", "CPU:1"]
)
SHAPE = Shape.of(batch=4, io=3)
# Four stages of two layers on two cores: this is the second core, at a tick of its second stage.
STAGE, ROUND, MICROBATCH = 3, 1, 2
draw = np.random.default_rng(0)
X, GRAD = (draw.normal(size=[4, 3]).astype(np.float32) for _ in range(2))
OWN = draw.normal(size=[2, 1, 2, 3]).astype(np.float32)
SHARED = draw.normal(size=[3]).astype(np.float32)


def tick(busy=True):
    def each(value):
        return (tf.constant(value),) * 2

    zero = tf.constant(0)
    slots = (zero, zero, tf.constant(False))
    return Tick(each(STAGE), each(ROUND), each(MICROBATCH), each(busy), *slots)


def split(value):
    return ops.import_tensor(LOWERING, tf.constant(value), SHAPE).slices


def weights_of(*values):
    return [(tf.constant(value),) * 2 for value in values]


def stage_of(layer, along=(), batch_axes=("data",)):
    weights = [
        LoopWeight("own", Shape.of(io=3), True, batch_axes),
        LoopWeight("shared", Shape.of(io=3), False, ("layers", *batch_axes)),
    ]
    return NamedStage(LOWERING, layer, 2, SHAPE, Dim("batch", 16), weights, along)


def affine(x, weights, position):
    # The square does not vary along `data`, so its gradient is whole on both devices.
    return x * weights["own"] + ops.square(weights["own"]) + weights["shared"]


def plain(x, own, shared):
    for one in own:
        x = x * one + one**2 + shared
    return x


def whole(leaf):
    return np.concatenate([part.numpy() for part in leaf])


def test_a_stage_is_its_layers_one_after_the_other_with_the_weights_of_its_round():
    numbers = []

    def noting(x, weights, position):
        numbers.append([int(number) for number in position.layer])
        assert [int(number) for number in position.microbatch] == [MICROBATCH] * 2
        return affine(x, weights, position)

    (y,) = stage_of(noting).forward(tick(), (split(X),), weights_of(OWN, SHARED))
    np.testing.assert_allclose(whole(y), plain(X, OWN[ROUND, 0], SHARED), rtol=1e-5)
    assert numbers == [[2 * STAGE] * 2, [2 * STAGE + 1] * 2]


@pytest.mark.parametrize("batch_axes", [("data",), ()])
def test_gradients_of_weights_are_added_to_those_of_their_round(batch_axes):
    stage, given = stage_of(affine, batch_axes=batch_axes), weights_of(OWN, SHARED)
    before = [tuple(part + 1 for part in sums) for sums in stage.zero_sums(given)]
    (grad_x,), sums = stage.backward(tick(), (split(X),), given, (split(GRAD),), before)

    x, own, shared = (tf.constant(value) for value in (X, OWN[ROUND, 0], SHARED))
    with tf.GradientTape() as tape:
        tape.watch([x, own, shared])
        y = plain(x, tf.unstack(own), shared)
    wanted_x, wanted_own, wanted_shared = tape.gradient(y, [x, own, shared], tf.constant(GRAD))
    np.testing.assert_allclose(whole(grad_x), wanted_x, rtol=1e-5)
    for found, wanted in zip(sums, (wanted_own, wanted_shared), strict=True):
        added = [part.numpy() - 1 for part in found]
        # Of what is summed over copies later each has a part, else each has all.
        total = sum(added) if batch_axes else added[1]
        if found is sums[0]:
            assert not total[1 - ROUND].any()
            total = total[ROUND, 0]
        np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=1e-5)


def test_at_a_tick_without_work_sums_stay_as_they_are_whatever_is_computed():
    stage = stage_of(affine)
    given = weights_of(OWN, SHARED)
    sums = [tuple(part + 1 for part in each) for each in stage.zero_sums(given)]
    nothing = split(np.full([4, 3], np.nan, np.float32))
    _, after = stage.backward(tick(busy=False), (nothing,), given, (nothing,), sums)
    for one, other in zip(sums, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sums_are_at_least_of_32_bits():
    own, shared = stage_of(affine).zero_sums(
        weights_of(OWN.astype(tf.bfloat16.as_numpy_dtype), SHARED.astype(np.float64))
    )
    assert [part.dtype for part in (*own, *shared)] == [tf.float32] * 2 + [tf.float64] * 2
    assert own[0].shape == OWN.shape


def test_what_goes_along_is_that_of_the_microbatch_and_what_is_unused_has_no_gradient():
    slots = tuple(tf.constant(np.stack([part * m for m in range(4)])) for part in split(X))

    def adding(x, weights, position, along):
        return x * 2.0 + along

    stage = stage_of(adding, along=[(SHAPE, slots)])
    given = weights_of(OWN, SHARED)
    (y,) = stage.forward(tick(), (split(X),), given)
    np.testing.assert_allclose(whole(y), 4 * X + 3 * MICROBATCH * X, rtol=1e-5)
    zeros = stage.zero_sums(given)
    (grad_x,), sums = stage.backward(tick(), (split(X),), given, (split(GRAD),), zeros)
    np.testing.assert_allclose(whole(grad_x), 4 * GRAD, rtol=1e-6)
    assert not any(part.numpy().any() for each in sums for part in each)


def test_over_layers_no_copy_works_on_the_same():
    weight = LoopWeight("w", Shape.of(io=3), False, ("layers", "data"))
    assert weight.batch_axes == ("data",)
