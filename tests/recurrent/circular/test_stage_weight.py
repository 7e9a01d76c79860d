"""Weights whose gradients are summed over copies later."""

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.recurrent.circular.stage_weight import StageWeight


def make(text):
    mesh = Mesh.from_text(text)
    rules = LayoutRules.from_text(";".join(f"{a}:{a}" for a in mesh.axis_names))
    return PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(mesh.num_devices)])


def make_weight(lowering, later):
    shape = Shape.of(io=2)
    values = tf.constant([1.0, 2.0])
    slices, partial = (ops.import_tensor(lowering, values, shape).slices for _ in range(2))
    return StageWeight(lowering, slices, shape, partial, later)


def gradients(lowering, weight, function):
    with tf.GradientTape() as tape:
        tape.watch([weight.slices, weight.partial])
        y = ops.reduce_sum(function(weight))
    return tape.gradient(y.slices, [weight.slices, weight.partial])


def test_each_copy_gets_what_its_own_examples_add():
    lowering = make("data:2")
    x = ops.import_tensor(lowering, np.arange(8.0, dtype=np.float32).reshape(4, 2), "data:4;io:2")
    weight = make_weight(lowering, ("data",))
    whole, partial = gradients(lowering, weight, lambda w: x * w)
    assert whole == (None, None)
    np.testing.assert_array_equal(partial, [[2, 4], [10, 12]])
    assert lowering.costs.calls("all_reduce") == 1  # The loss.


def test_a_use_that_does_not_vary_has_the_whole_gradient():
    lowering = make("data:2")
    weight = make_weight(lowering, ("data",))
    whole, partial = gradients(lowering, weight, ops.square)
    np.testing.assert_array_equal(whole, [[2, 4], [2, 4]])
    assert partial == (None, None)


def test_other_axes_are_summed_at_once():
    lowering = make("data:2;model:2")
    x = ops.import_tensor(lowering, tf.ones([2, 2, 2]), "data:2;model:2;io:2")
    weight = make_weight(lowering, ("data",))
    _, partial = gradients(lowering, weight, lambda w: x * w)
    np.testing.assert_array_equal(partial, [[2, 2]] * 4)


def test_what_meets_only_one_of_two_later_axes_is_summed_at_once():
    lowering = make("data:2;model:2")
    x = ops.import_tensor(lowering, tf.ones([2, 2]), "data:2;io:2")
    weight = make_weight(lowering, ("data", "model"))
    whole, partial = gradients(lowering, weight, lambda w: x * w)
    np.testing.assert_array_equal(whole, [[2, 2]] * 4)
    assert partial == (None,) * 4
