"""Plain functions and Keras layers in stacks equal themselves."""

import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import layers, py_utils, tshape

from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers import (
    FeatureExtractionLayer,
    FunctionLayer,
    KerasLayer,
    PartitionSequentialLayers,
    PipeliningLayer,
)
from tests.layers.harness import cluster, executing, run_tf2
from tests.layers.stacks import EXACT, equal_to_plain, stack_of

VECTORS = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)


def noisy(x):
    return tf.nn.dropout(x, 0.5)


def dense():
    return layers.FCLayer.Params().Set(input_dim=4, output_dim=4, activation="TANH")


def stages(number):
    return PartitionSequentialLayers(
        [dense(), tf.square, dense(), noisy, lambda x: (x, x + 1), tf.add],
        number,
        tshape.Shape([8, 4]),
    )


def test_a_list_with_functions_is_cut_and_equals_the_plain_stack(run):
    stack = PipeliningLayer.Params().Set(name="stack", cell_tpl=stages(3), num_micro_batches=4)
    equal_to_plain(run, stack, [VECTORS], 3, **EXACT)


def test_flops_of_functions_are_those_of_products():
    matrix = tf.ones([4, 6])
    params = FunctionLayer.Params().Set(name="f", function=lambda x, y: (x @ matrix, y))
    meta = FunctionLayer.FPropMeta(params, tshape.Shape([8, 4]), None)
    assert meta.flops == 2 * 8 * 4 * 6
    product, nothing = meta.out_shapes
    assert product.ToTensorShape().as_list() == [8, 6] and nothing is None
    params.flops = lambda *shapes: 7
    assert FunctionLayer.FPropMeta(params, tshape.Shape([8, 4]), None).flops == 7


def test_what_is_no_function():
    with pytest.raises(PipelineError, match="function is 3; give a function of tensors"):
        FunctionLayer.Params().Set(name="f", function=3).Instantiate()
    with pytest.raises(PipelineError, match=r"sub\[0\] .* write FunctionLayer.Params\(\)"):
        FeatureExtractionLayer.Params().Set(name="stage", sub=[tf.square]).Instantiate()
    with pytest.raises(PartitionError, match=r"write FCLayer.Params\(\)"):
        PartitionSequentialLayers([layers.FCLayer], 1, tshape.Shape([8, 4]))


def test_live_layers_are_refused_by_name():
    with tf.Graph().as_default():
        live = dense().Set(name="live").Instantiate()
    for layer, give in (
        (live, r"a FCLayer, .*give FCLayer\.Params\(\)"),
        (
            keras.layers.Dense(4),
            r"a Dense, .*give KerasLayer\.Params\(\)\.Set\(name=\.\.\., layer=D",
        ),
    ):
        with pytest.raises(PartitionError, match=f"layer 1 of what is to be cut is {give}"):
            PartitionSequentialLayers([dense(), layer], 1, tshape.Shape([8, 4]))
        with pytest.raises(PipelineError, match=give):
            FeatureExtractionLayer.Params().Set(name="stage", sub=[layer]).Instantiate()
        with pytest.raises(PipelineError, match=f"f: function is {give}"):
            FunctionLayer.Params().Set(name="f", function=layer).Instantiate()


class Dense(tf.Module):
    """Holds a weight, and is called, or one of its methods is."""

    def __init__(self, seed):
        super().__init__()
        value = np.random.default_rng(seed).normal(size=[4, 4]).astype(np.float32)
        self.w = tf.compat.v1.get_variable(f"w{seed}", initializer=value, use_resource=True)

    def __call__(self, x):
        return tf.tanh(x @ self.w)

    def residual(self, x):
        return x + self(x)


def objects():
    """Live objects that can be called, and their weights."""
    a, b, c = map(Dense, range(3))
    return [a, b.residual, functools.partial(lambda x, w: tf.sin(x @ w), w=c.w)], [a.w, b.w, c.w]


def outputs_and_gradients(function, weights):
    with tf.GradientTape() as tape:
        y = function(tf.constant(VECTORS))
        loss = tf.reduce_sum(y**2)
    return [y, *tape.gradient(loss, weights)]


@pytest.mark.parametrize("mode", ["tf1", "function", "eager"])
def test_live_objects_get_their_gradients(mode):
    with executing(mode != "tf1", 2):
        calls, weights = objects()
        # What is made of params must see what is assigned later.
        assign = [w.assign(w * 2) for w in weights]

        def plain_functions(x):
            return functools.reduce(lambda y, call: call(y), calls, x)

        cells = PartitionSequentialLayers(calls, 2, tshape.Shape([8, 4]))
        params = PipeliningLayer.Params().Set(name="stack", cell_tpl=cells, num_micro_batches=4)
        computed = []
        for function in (params.Instantiate().FPropDefaultTheta, plain_functions):
            compute = functools.partial(outputs_and_gradients, function, weights)
            if mode == "function":
                compute = tf.function(compute, autograph=False)
            computed.append(compute())
        if mode == "tf1":
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(assign)
                computed = session.run(computed)
    for found, wanted in zip(*computed, strict=True):
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 3, 4]).astype(np.float32)


def wrapped(name, layer, shapes=((None, 3, 4),)):
    return KerasLayer.Params().Set(name=name, layer=layer, input_shapes=[*shapes])


def block(dropout=0.3):
    """A model with nested layers, whose dropout is told nothing of training by its caller."""

    class Residual(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(4, activation="tanh")
            self.dropout = keras.layers.Dropout(dropout)
            self.norm = keras.layers.LayerNormalization()

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)
            self.built = True

        def call(self, x):
            return self.norm(x + self.dropout(self.dense(x)))

    return Residual()


def test_a_pipeline_equals_the_plain_stack_with_dropout_on():
    params = stack_of([wrapped(f"keras{i}", block) for i in range(2)], [0, 1, 2])
    params.num_micro_batches = 2
    equal_to_plain(run_tf2, params, [X], "layers:2;data:2", steps=2, rtol=2e-4, atol=2e-5)


def test_it_computes_what_keras_does(eagerly):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(5, activation="gelu"), keras.layers.Dense(2)])
    model.build((None, 3, 4))
    layer = wrapped("model", lambda: model).Instantiate()
    shapes = sorted(tuple(v.shape.as_list()) for v in layer.vars.Flatten())
    assert shapes == [(2,), (4, 5), (5,), (5, 2)]
    np.testing.assert_allclose(layer.FPropDefaultTheta(tf.constant(X)), model(X), rtol=1e-5)


def test_each_copy_has_weights_of_its_own(eagerly):
    template = keras.layers.Dense(4)
    first, second = (wrapped(name, template).Instantiate() for name in "ab")
    assert not np.array_equal(first.vars.kernel, second.vars.kernel)


def test_dropout_is_off_in_evaluation_and_another_one_in_each_step(eagerly):
    params, step = wrapped("drop", keras.layers.Dropout(0.5)), py_utils.GetOrCreateGlobalStepVar()
    with cluster(1, do_eval=True):
        np.testing.assert_array_equal(params.Instantiate().FPropDefaultTheta(tf.constant(X)), X)
    with cluster(1):
        cell = FeatureExtractionLayer.Params().Set(name="s", sub=[params])
        layer = PipeliningLayer.Params().Set(name="p", cell_tpl=[cell]).Instantiate()
        run = tf.function(layer.FPropDefaultTheta, autograph=False)
        step.assign(0)
        first, again = run(tf.constant(X)), run(tf.constant(X))
        step.assign(1)
        other = run(tf.constant(X))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert set(np.unique(np.round(np.asarray(first) / X, 3))) == {0.0, 2.0}


def test_flops_are_those_of_products(eagerly):
    params = wrapped("dense", keras.layers.Dense(5))
    meta = KerasLayer.FPropMeta(params, tshape.Shape([8, 3, 4]))
    assert meta.flops == 2 * 8 * 3 * 4 * 5
    assert [shape.ToTensorShape().as_list() for shape in meta.out_shapes] == [[8, 3, 5]]
    assert meta.parameter_bytes == (4 * 5 + 5) * 4
    conv = wrapped("conv", keras.layers.Conv2D(6, 3), [[None, 8, 8, 2]])
    meta = KerasLayer.FPropMeta(conv, tshape.Shape([4, 8, 8, 2]))
    assert meta.flops == 2 * 3 * 3 * 2 * 4 * 6 * 6 * 6
    attention = wrapped("mha", keras.layers.MultiHeadAttention(2, 3), [(None, 3, 4)] * 2)
    meta = KerasLayer.FPropMeta(attention, *[tshape.Shape([8, 3, 4])] * 2)
    assert meta.flops == 2 * 8 * (4 * 3 * 4 * 6 + 2 * 3 * 3 * 6)


@pytest.mark.parametrize(
    ("layer", "params", "text"),
    [
        (3, {}, "layer is 3; give a Keras layer"),
        (lambda: 3, {}, r"layer\(\) returned 3, which is no Keras layer"),
        (keras.layers.Dense(3), {"input_shapes": None}, r"Dense makes its .* set input_shapes"),
        (
            keras.layers.Dense(4),
            {"fprop_dtype": tf.bfloat16},
            "in float32, but fprop_dtype is bfloat16; make it with dtype='mixed_bfloat16'",
        ),
        # There is no mixed_float32.
        (
            keras.layers.Dense(4, dtype="bfloat16"),
            {},
            "in bfloat16, but fprop_dtype is float32; make it with dtype='float32'",
        ),
    ],
)
def test_wrong_params_say_what_to_give(eagerly, layer, params, text):
    with pytest.raises(PipelineError, match=text):
        wrapped("k", layer).Set(**params).Instantiate().FPropDefaultTheta(tf.constant(X))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            keras.layers.BatchNormalization,
            r"BatchNormalization updates 'moving_mean'.*freeze it",
        ),
        (
            lambda: keras.layers.Dense(4, kernel_regularizer="l2"),
            r"k: a Dense adds to the loss .*KerasTask",
        ),
        (
            lambda: keras.layers.Dense(4, activity_regularizer="l1"),
            r"k: a Dense adds to the loss .*KerasTask",
        ),
    ],
    ids=["state", "weights", "activities"],
)
def test_what_a_stage_cannot_hand_on_is_an_error_in_training(eagerly, make, text):
    layer = wrapped("k", make).Instantiate()
    with pytest.raises(PipelineError, match=text):
        layer.FPropDefaultTheta(tf.constant(X))
    with cluster(1, do_eval=True):
        assert layer.FPropDefaultTheta(tf.constant(X)).shape == X.shape


def test_a_constraint_holds_after_each_step(eagerly):
    layer = wrapped("dense", keras.layers.Dense(4, kernel_constraint="non_neg")).Instantiate()
    kernel = layer.vars.kernel.numpy()
    assert kernel.min() < 0
    layer.PostTrainingStepUpdate()
    np.testing.assert_array_equal(layer.vars.kernel, np.maximum(kernel, 0))


def test_names_of_weights_do_not_depend_on_what_else_the_process_has_made(eagerly):
    """Keras numbers layers without a name on and on: a checkpoint would not fit the next time."""

    def model():
        return keras.Sequential(
            [keras.layers.Dense(4), keras.layers.Dense(4), keras.layers.Dense(4, name="own_7")]
        )

    wanted = [f"{layer}_{v}" for layer in ("dense", "dense_1", "own") for v in ("bias", "kernel")]
    for name in "ab":
        keras.layers.Dense(3)
        assert sorted(wrapped(name, model).Instantiate().vars) == sorted(wanted)


def test_initial_values_are_those_of_the_random_seed_and_the_name(eagerly):
    def kernel(name, seed):
        params = wrapped(name, lambda: keras.layers.Dense(4)).Set(random_seed=seed)
        with py_utils.VariableStore():
            return params.Instantiate().vars.kernel.numpy()

    state = random.getstate()
    np.testing.assert_array_equal(kernel("a", 1), kernel("a", 1))
    assert random.getstate() == state
    assert not np.array_equal(kernel("a", 1), kernel("a", 2))
    assert not np.array_equal(kernel("a", 1), kernel("b", 1))


def test_tf1_behaviour_is_an_error():
    with tf.Graph().as_default(), pytest.raises(PipelineError, match="SetEagerMode"):
        wrapped("dense", keras.layers.Dense(4)).Instantiate()
