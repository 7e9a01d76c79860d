"""Normalization and dropout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.layers import FeatureExtractionLayer
from pipemesh.layers.named import (
    BatchNorm,
    Convolution,
    Dropout,
    Norm,
    current_lowering,
    lowering_scope,
)
from pipemesh.layers.named.scope import unnamed
from pipemesh.lowering import ops
from tests.layers.harness import cluster, run_tf2
from tests.layers.named.harness import make_lowering, run, value_of
from tests.layers.stacks import stack_of
from tests.pairwise import in_turn

X = value_of("x", [4, 3, 8])
PARAMS = Norm.Params().Set(name="norm", input_dim=8)
IMAGES = value_of("images", [4, 4, 2, 8])
BATCH_NORM = BatchNorm.Params().Set(name="norm", input_dim=8, decay=0.9)


# Layouts equal one processor (tests/conformance).
@pytest.mark.parametrize(("kind", "direct_scale"), [("layer", False), ("rms", True)])
def test_results_and_gradients_are_those_of_plain_tensorflow(kind, direct_scale):
    def plain(w):
        x = X - X.mean(2, keepdims=True) if kind == "layer" else X
        root = np.sqrt((x**2).mean(2, keepdims=True) + 1e-6)
        return x / root * (w["scale"] + float(not direct_scale)) + w.get("bias", 0.0)

    params = PARAMS.Copy().Set(kind=kind, direct_scale=direct_scale)
    run(params, [X]).assert_plain(plain)


def test_group_norm_is_that_of_plain_tensorflow():
    params = PARAMS.Copy().Set(kind="group", dim="channels", num_groups=4, epsilon=1e-3)

    def plain(w):
        x = IMAGES.reshape([4, 4, 2, 4, 2])
        mean, variance = tf.nn.moments(x, [1, 2, 4], keepdims=True)
        x = tf.reshape((x - mean) / tf.sqrt(variance + 1e-3), IMAGES.shape)
        return x * (1 + w["scale"]) + w["bias"]

    run(params, [IMAGES]).assert_plain(plain)


def test_batch_norm_is_that_of_plain_tensorflow():
    def plain(w):
        mean, variance = tf.nn.moments(IMAGES, [0, 1, 2])
        return (IMAGES - mean) / tf.sqrt(variance + 1e-3) * (1 + w["scale"]) + w["bias"]

    run(BATCH_NORM, [IMAGES]).assert_plain(plain)


def test_evaluation_uses_moving_averages_of_all_batches():
    with lowering_scope(make_lowering("model:2", "channels:model")):
        with cluster(1):
            layer = BATCH_NORM.Instantiate()
            for images in (IMAGES, 2 * IMAGES):
                layer.FPropDefaultTheta(tf.constant(images))
            layer.PostTrainingStepUpdate()
        both = np.stack([IMAGES, 2 * IMAGES])
        mean, variance = 0.1 * both.mean((0, 1, 2, 3)), 0.9 + 0.1 * both.var((0, 1, 2, 3))
        for i, half in enumerate((slice(4), slice(4, 8))):
            np.testing.assert_allclose(layer.vars[f"moving_mean_slice_{i}"], mean[half], 1e-5, 1e-6)
        with cluster(1, do_eval=True):
            judged = BATCH_NORM.Instantiate()
            theta = layer.theta.Transform(tf.convert_to_tensor)
            found = ops.export_tensor(judged.FProp(theta, tf.constant(IMAGES)))
    np.testing.assert_allclose(found, (IMAGES - mean) / np.sqrt(variance + 1e-3), 1e-4, 1e-5)


def test_moving_variance_is_exact_beside_a_large_mean():
    far = (255 + 0.01 * IMAGES).astype(np.float32)
    layer = BATCH_NORM.Copy().Set(decay=0.0).Instantiate()
    for images in (far[:2], far[2:]):
        layer.FPropDefaultTheta(tf.constant(images))
    layer.PostTrainingStepUpdate()
    wanted = far.astype(np.float64).var((0, 1, 2))
    np.testing.assert_allclose(layer.vars.moving_variance, wanted, 1e-2)


@pytest.mark.parametrize(
    ("params", "rules"),
    in_turn(
        [
            PARAMS.Copy().Set(dim="channels"),
            PARAMS.Copy().Set(dim="channels", kind="rms"),
            PARAMS.Copy().Set(dim="channels", kind="group", num_groups=2),
            BATCH_NORM,
        ],
        ["height:data;channels:model", ""],
    ),
)
def test_dim_may_be_anywhere_or_last_without_names(params, rules):
    def channels_first(layer, theta, x):
        x = layer.Named(x, "batch;height;width;channels")
        return layer.FProp(theta, ops.transpose(x, "batch;channels;height;width"))

    def nameless(layer, theta, x):
        x = ops.import_tensor(current_lowering(), x, unnamed(x.shape.as_list(), 0))
        return layer.FProp(theta, x)

    wanted, *found = (
        run(params, [IMAGES], "data:2;model:2", rules, call=call)
        for call in (None, channels_first, nameless)
    )
    for result in found:
        result.assert_close(wanted)


def test_a_missing_dim_is_an_error():
    with lowering_scope(make_lowering("model:1")):
        layer = PARAMS.Copy().Set(dim="channels").Instantiate()
        with pytest.raises(ShapeError, match="no dim is called 'channels'"):
            layer.FPropDefaultTheta(layer.Named(tf.constant(X), "batch;length;embed"))


@pytest.mark.parametrize("mesh", ["layers:2;rows:2 height:rows", "layers:2;data:2"])
def test_a_pipeline_counts_the_moments_of_the_whole_batch(mesh):
    layers = [BATCH_NORM, Convolution.Params().Set(name="conv", input_dim=8, output_dim=2)]
    stack = stack_of(layers, [0, 1, 2], num_micro_batches=2)
    found = run_tf2(stack, [IMAGES], num_devices=mesh)
    # By name: counts, means, squares of differences from the mean.
    wanted = [4 * 4 * 2, IMAGES.mean((0, 1, 2)), 4 * 4 * 2 * IMAGES.var((0, 1, 2))]
    for a, b in zip(found.accumulators, wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-4)


def test_moments_of_bfloat16_are_computed_in_float32():
    params = PARAMS.Copy().Set(fprop_dtype=tf.bfloat16)
    rounded = tf.cast(X, tf.bfloat16)
    found = run(params, [rounded.numpy()], initial=True).outputs[0]
    mean, variance = tf.nn.moments(tf.cast(rounded, tf.float32), [2], keepdims=True)
    wanted = (tf.cast(rounded, tf.float32) - mean) / tf.sqrt(variance + 1e-6)
    assert found.dtype == tf.bfloat16.as_numpy_dtype
    assert abs(found.astype("float32") - wanted.numpy()).max() < 0.01


@pytest.mark.parametrize("direct_scale", [False, True])
def test_a_new_norm_only_divides_by_the_root_with_epsilon(direct_scale):
    params = PARAMS.Copy().Set(epsilon=0.5, kind="rms", direct_scale=direct_scale)
    wanted = X / np.sqrt((X**2).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(run(params, [X], initial=True).outputs[0], wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_second_derivatives(kind):
    layer = PARAMS.Copy().Set(kind=kind).Instantiate()
    x = tf.constant(X)

    def squared_gradient(forward):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(forward() ** 3)
            found = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(found, x)

    def plain():
        centered = x - tf.reduce_mean(x, 2, keepdims=True) if kind == "layer" else x
        return centered * tf.math.rsqrt(tf.reduce_mean(centered**2, 2, keepdims=True) + 1e-6)

    weights = [tf.zeros([8])] * len(layer.NamedWeights(layer.params))
    found = squared_gradient(lambda: layer._WholeVectors(x, *weights))
    np.testing.assert_allclose(found, squared_gradient(plain), 1e-3, 1e-3)


ONES = np.ones([4, 3, 8], np.float32)
DROPOUT = Dropout.Params().Set(name="dropout", rate=0.5)


def call(layer, theta, x):
    return layer.FProp(theta, layer.Named(x, "batch;length;embed"))


def test_masks_differ_by_step_by_layer_and_by_call():
    first = run(DROPOUT, [ONES], call=call).outputs[0]
    same = run(DROPOUT, [ONES], call=call).outputs[0]
    step = run(DROPOUT, [ONES], call=call, step=4).outputs[0]
    layer = run(DROPOUT.Copy().Set(name="other"), [ONES], call=call).outputs[0]

    def twice(layer, theta, x):
        return call(layer, theta, x), call(layer, theta, x)

    one, two = run(DROPOUT, [ONES], call=twice).outputs
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first == same).all() and (first == one).all()
    assert (first != step).any() and (first != layer).any() and (one != two).any()


def test_nothing_is_dropped_in_evaluation():
    def in_evaluation(layer, theta, x):
        with cluster(1, do_eval=True):
            return call(layer.params.Copy().Instantiate(), theta, x)

    assert (run(DROPOUT, [ONES], call=in_evaluation).outputs[0] == 1).all()


def test_in_a_stack_masks_go_by_the_names_of_its_layers():
    class Both(Dropout):
        def FProp(self, theta, x):
            return super().FProp(theta, self.Named(x, "batch;length;embed"))

    def stack(*names):
        subs = [Both.Params().Set(name=name, rate=0.5) for name in names]
        params = FeatureExtractionLayer.Params().Set(name="stage", sub=subs)
        rules = "batch:data;embed:model"
        return run(params, [ONES], "data:2;model:2", rules, loss=None).outputs[0]

    assert (stack("a") == stack("a")).all()
    assert (stack("a") != stack("b")).any()
    # Not the same numbers twice.
    assert (stack("a", "b") != 0).mean() < 0.4
