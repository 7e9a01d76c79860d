"""Layers that reach weights otherwise than through theta, or that change something."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import bn_layers, py_utils

from pipemesh.errors import PipelineError
from tests.layers.blocks import WIDTH, Weighted
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2
from tests.layers.stacks import stack_of

X = np.random.default_rng(0).normal(size=[8, WIDTH]).astype(np.float32)


class Dense(Weighted):
    """A product with a weight that is reached as `way` says."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("way", "theta", "How the weight is reached.")
        return p

    def FProp(self, theta, x):
        weight = {
            "theta": lambda: theta.w,
            "self.theta": lambda: self.theta.w,
            "self.vars": lambda: tf.convert_to_tensor(self.vars.w),
            "tied": lambda: self.parent.parent.children["s0"].children["layer0"].vars.w,
        }[self.params.way]()
        return tf.nn.tanh(tf.matmul(x, weight)) + x

    @classmethod
    def FPropMeta(cls, p, x):
        return py_utils.NestedMap(flops=1, out_shapes=(x,))


def stack(way="theta"):
    ways = [way if way != "tied" else "theta"] * 2 + [way] * 2
    sub = [Dense.Params().Set(name=f"layer{i}", way=ways[i]) for i in range(4)]
    return stack_of(sub, [0, 2, 4], num_micro_batches=4)


@pytest.mark.parametrize(
    ("run", "way"), [(run_tf1, "self.theta"), (run_tf2, "self.vars"), (run_eagerly, "tied")]
)
def test_a_weight_trains_however_a_layer_reaches_it(run, way):
    params = stack(way)
    wanted = run_tf2(params.Copy().Set(pipelined=False), [X], steps=2)
    got = run(params, [X], steps=2, num_devices=2)
    got.assert_close(wanted, rtol=1e-4, atol=1e-5)
    assert len(got.grads) == (2 if way == "tied" else 4)


class Scaled(Dense):
    """Multiplies by an eager tensor, which whoever calls the model sets for every step."""

    def FProp(self, theta, x):
        return super().FProp(theta, x) * tf.reduce_mean(SCALE[0])


SCALE: list[tf.Tensor] = []


@pytest.mark.parametrize("size", [1, 1000])
def test_an_eager_tensor_that_would_keep_its_first_value_is_refused(size):
    params = stack()
    params.cell_tpl[1].sub[0].cls = Scaled
    SCALE[:] = [tf.fill([size], 2.0)]
    with pytest.raises(PipelineError, match=r"uses an eager tensor of shape .*tf\.Variable"):
        run_eagerly(params, [X], num_devices=2, loss=None)


class Averaging(Dense):
    """Keeps an average in a variable, as batch normalization of Keras and lingvo does it."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        average = py_utils.WeightParams([WIDTH], py_utils.WeightInit.Constant(0.0))
        self.CreateVariable("average", average, trainable=False)

    def FProp(self, theta, x):
        self.vars.average.assign_sub(0.1 * (self.vars.average - tf.reduce_mean(x, axis=0)))
        return super().FProp(theta, x)


@pytest.mark.parametrize("run", [run_tf1, run_tf2, run_eagerly])
def test_a_layer_that_assigns_is_refused_with_the_way_out(run):
    params = stack()
    params.cell_tpl[1].sub[0].cls = Averaging
    with pytest.raises(PipelineError, match=r"stage 's1' contains .*layer\.layer2.*accumulators"):
        run(params, [X], num_devices=2)


def normalizing(**kwargs):
    layer = bn_layers.BatchNormLayerNoPadding.Params().Set(name="bn", dim=WIDTH)
    return stack_of([layer], [0, 1], **kwargs)


IMAGES = np.random.default_rng(1).normal(size=[8, 3, 3, WIDTH]).astype(np.float32)


def test_batch_normalization_with_accumulators_has_the_statistics_of_the_whole_batch(run):
    """It normalizes by microbatch, as in GPipe, and averages over the whole batch."""
    whole = normalizing(pipelined=False)
    wanted = run(whole, [IMAGES])
    got = run(normalizing(num_micro_batches=4), [IMAGES])
    assert len(got.accumulators) == 3
    for a, b in zip(got.accumulators, wanted.accumulators, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    parts = [run(whole, [part]).outputs[0] for part in np.split(IMAGES, 4)]
    np.testing.assert_allclose(got.outputs[0], np.concatenate(parts), rtol=1e-4, atol=1e-5)
    assert np.abs(got.outputs[0] - wanted.outputs[0]).max() > 0.01


def test_an_evaluation_before_the_first_step_leaves_accumulators_to_training(eagerly):
    """They kept tensors of the graph that evaluates, out of the scope of the one that trains."""
    images = tf.constant(IMAGES)
    with cluster(1):
        py_utils.GetOrCreateGlobalStepVar()
        stack = normalizing(num_micro_batches=2).Instantiate()

    def call():
        outputs = stack.FPropDefaultTheta(images)
        stack.PostTrainingStepUpdate()
        return outputs

    with cluster(1, do_eval=True):
        for _ in range(2):
            tf.function(stack.FPropDefaultTheta, autograph=False)(images)
    with cluster(1):
        tf.function(call, autograph=False)()
    mean = 0.003 * tf.reduce_mean(images, axis=[0, 1, 2])
    np.testing.assert_allclose(stack.vars.s0.bn.moving_mean, mean, rtol=1e-4, atol=1e-7)
