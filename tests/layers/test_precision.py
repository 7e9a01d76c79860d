"""A PipeliningLayer computes in few bits from float32 weights, as `fprop_dtype` says."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import run_tf1, run_tf2
from tests.layers.stacks import stack_of

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(1)
X = RNG.normal(size=[8, 3, WIDTH]).astype(np.float32)


class Head(Block):
    def FProp(self, theta, x, labels):
        assert x.dtype == theta.w.dtype == (self.params.fprop_dtype or tf.float32)
        assert labels.dtype == tf.float32
        y = tf.cast(super().FProp(theta, x), tf.float32)
        error = tf.reduce_sum(tf.square(y - labels), axis=[1, 2])
        return tf.reduce_sum(error), tf.cast(tf.size(error), tf.float32)


def pipelined(dtype):
    sub = [*blocks(3, rate=0.0), Head.Params().Set(name="head", rate=0.0)]
    options = {"num_micro_batches": 4, "schedule": "1f1b", "loss_inside": True}
    return stack_of(sub, [0, 2, 4], fprop_dtype=dtype, **options)


def mean(outputs):
    return outputs[0] / outputs[1]


@pytest.mark.parametrize(("run", "dtype"), [(run_tf2, tf.bfloat16), (run_tf1, tf.float16)])
def test_gradients_and_weights_are_float32_and_close_to_those_of_float32(run, dtype):
    wanted = run(pipelined(None), [X, X], steps=3, num_devices=2, loss=mean)
    got = run(pipelined(dtype), [X, X], steps=3, num_devices=2, loss=mean)
    tolerance = 3e-2 if dtype == tf.bfloat16 else 1e-2
    assert got.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert got.grads[name].dtype == np.float32
        np.testing.assert_allclose(got.grads[name], grad, atol=tolerance * np.abs(grad).max())
        assert (got.grads[name] != grad).any()
    scaling = {name for name in got.weights if name not in wanted.weights}
    assert {name.split("/")[-2] for name in scaling} == (
        {"loss_scale", "good_steps", "finite"} if dtype == tf.float16 else set()
    )


def test_evaluation_computes_in_it_too():
    wanted = run_tf2(pipelined(None), [X, X], do_eval=True, loss=None)
    for devices in (1, 2):
        params = pipelined(tf.bfloat16)
        result = run_tf2(params, [X, X], num_devices=devices, do_eval=True, loss=None)
        assert float(result.outputs[0]) == pytest.approx(float(wanted.outputs[0]), rel=3e-2)


class Noting(Block):
    """A block that notes the dtypes that it sees."""

    def FProp(self, theta, x):
        SEEN.append((self.params.name, x.dtype, theta.w.dtype))
        return tf.cast(super().FProp(theta, tf.cast(x, theta.w.dtype)), x.dtype)


SEEN: list[tuple[str, tf.DType, tf.DType]] = []


@pytest.mark.parametrize(("run", "do_eval"), [(run_tf1, False), (run_tf2, True)])
def test_a_layer_with_a_dtype_of_its_own_computes_with_weights_in_it(run, do_eval):
    sub = [Noting.Params().Set(name=f"layer{i}", rate=0.0) for i in range(3)]
    sub[1].fprop_dtype = tf.float32
    params = stack_of(sub, [0, 3], num_micro_batches=2, fprop_dtype=tf.bfloat16)
    SEEN.clear()
    result = run(params, [X], do_eval=do_eval, loss=None if do_eval else lambda y: tf.reduce_sum(y))
    assert {(name, weight) for name, _, weight in SEEN} == {
        ("layer0", tf.bfloat16),
        ("layer1", tf.float32),
        ("layer2", tf.bfloat16),
    }
    assert all(grad.dtype == np.float32 for grad in result.grads.values())


class Noisy(Block):
    """A block whose weight has variational noise, as lingvo's layers add it."""

    def AddGlobalVN(self, theta):
        theta = super().AddGlobalVN(theta)
        theta.w = self.AddVN(theta.w)
        return theta


def noisy(dtype, scale=0.5):
    noise = {"scale": scale, "global_vn": True, "deterministic": True, "seed": 7}
    block = Noisy.Params().Set(rate=0.0, vn=py_utils.VariationalNoiseParams(**noise))
    sub = [block.Copy().Set(name=f"block{i}") for i in range(2)]
    return stack_of(sub, [0, 1, 2], num_micro_batches=2, fprop_dtype=dtype)


def test_variational_noise_is_there_in_few_bits_too(run):
    noise, none = (run(noisy(dtype), [X], loss=None).outputs[0] for dtype in (None, tf.bfloat16))
    np.testing.assert_allclose(none, noise, atol=0.05 * np.abs(noise).max())
    quiet = run(noisy(None, scale=0.0), [X], loss=None).outputs[0]
    assert np.abs(quiet - noise).max() > 0.2 * np.abs(noise).max()
