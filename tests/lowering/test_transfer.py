"""Tensors whose sizes TensorFlow does not know beforehand lose no rows on their way in."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.lowering.simd.collectives import TpuLowering
from pipemesh.mesh import LayoutRules, Mesh, Shape
from tests.devices import device_name

pytestmark = pytest.mark.gpu

MESH = Mesh.from_text("data:2")


def make(lowers, rules="batch:data"):
    if lowers == "placement":
        return PlacementLowering(
            MESH, LayoutRules.from_text(rules), [device_name(0), device_name(1)]
        )
    return TpuLowering(Mesh.from_text("data:1"), LayoutRules(), tf.constant(0))


UNKNOWN = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, None]), tf.TensorSpec(None)]


@pytest.mark.parametrize("rules", ["batch:data", ""])
@pytest.mark.parametrize("spec", UNKNOWN)
@pytest.mark.parametrize("lowers", ["placement", "simd"])
def test_batch_of_unknown_size_is_checked_at_run_time(lowers, spec, rules):
    @tf.function(autograph=False, input_signature=[spec])
    def total(array):
        with tf.GradientTape() as tape:
            tape.watch(array)
            x = ops.import_tensor(make(lowers, rules), array, "batch:4;io:3")
            loss = ops.export_tensor(ops.reduce_sum(x * x))
        return loss, tape.gradient(loss, array)

    loss, grad = total(tf.ones([4, 3]))
    assert loss == 12
    np.testing.assert_array_equal(grad, 2 * np.ones([4, 3]))
    # Eight rows summed up to 12 as well.
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"batch_4\.io_3"):
        total(tf.ones([8, 3]))


@pytest.mark.parametrize("lowers", ["placement", "simd"])
def test_slices_of_unknown_size_are_checked_at_run_time(lowers):
    lowering = make(lowers)
    size = 4 // lowering.mesh.num_devices

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None])])
    def total(part):
        x = Tensor(lowering, (part,) * lowering.num_slices, Shape.of(batch=4))
        assert all(slice_.shape == [size] for slice_ in x.slices)
        return ops.export_tensor(ops.reduce_sum(x))

    assert total(tf.ones([size])) == 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        total(tf.ones([2 * size]))
