"""Keras layers whose weights a layout splits equal themselves on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils, tshape

from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.layers import (
    KerasLayer,
    KerasTask,
    PartitionSequentialLayers,
    PipeliningLayer,
    keras_layers,
)
from pipemesh.layers.named import by_logical_name, lowering_scope
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import executing, run_tf2
from tests.layers.stacks import equal_to_plain, first, stack_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 4, 8]).astype(np.float32)
IMAGES = RNG.normal(size=[2, 6, 6, 4]).astype(np.float32)
IDS = RNG.integers(0, 8, [2, 5]).astype(np.int32)
MODEL = "d_ff:model;heads:model;vocab:model;features:model"


def wrapped(name, layer, shapes=((None, 4, 8),), **params):
    # Values of weights with "named" in their names are those that Keras draws.
    return KerasLayer.Params().Set(
        name=f"named_{name}", layer=layer, input_shapes=[*shapes], random_seed=1, **params
    )


def mlp():
    return keras.Sequential(
        [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(8, activation="tanh")]
    )


class Block(keras.layers.Layer):
    """A Transformer's block with dropout, of plain Keras layers."""

    def __init__(self, rate=0.2):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(4, 3, dropout=rate, use_bias=False)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.wide, self.narrow = keras.layers.Dense(16, "relu"), keras.layers.Dense(8)
        self.dropout = keras.layers.Dropout(rate)

    def build(self, shape):
        self.attention.build(shape, shape)
        for norm in self.norms:
            norm.build(shape)
        self.wide.build(shape)
        self.narrow.build([*shape[:-1], 16])
        self.built = True

    def call(self, x):
        normed = self.norms[0](x)
        x += self.attention(normed, normed, use_causal_mask=True)
        return x + self.dropout(self.narrow(self.wide(self.norms[1](x))))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["layers:2;data:2;model:2", "layers:2;model:2,1"])
def test_blocks_with_dropout_equal_the_plain_stack(mesh):
    layers = [wrapped(f"block{number}", Block) for number in range(2)]
    stack = stack_of(layers, [0, 1, 2], num_micro_batches=2)
    mesh += " heads:model;d_ff:model"
    found = equal_to_plain(run_tf2, stack, [X], mesh, steps=2, rtol=3e-4, atol=3e-5)
    assert any("slice_1" in name for name in found.weights)


class Head(base_layer.BaseLayer):
    """A summed loss of each example, with its weight."""

    def FProp(self, theta, x):
        squares = tf.reduce_sum(tf.square(x), [1, 2])
        return tf.reduce_sum(squares), tf.size(squares), squares


def one_program(make):
    blocks = [wrapped(f"block{number}", make) for number in range(2)]
    head = Head.Params().Set(name="named_head")
    options = {"num_micro_batches": 2, "loss_inside": True, "lowering": "simd"}
    return stack_of([*blocks, head], [0, 1, 3], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*'s1_behind' has no layer with named dims")
def test_alike_layers_are_one_program():
    params, mesh = one_program(mlp), "layers:2;model:2 d_ff:model"
    equal_to_plain(run_tf2, params, [X], mesh, loss=first, rtol=3e-4, atol=3e-5)


@pytest.mark.filterwarnings("ignore:.*'s1_behind' has no layer with named dims")
def test_dropout_in_one_program_is_an_error():
    def dropping():
        return keras.Sequential([*mlp().layers, keras.layers.Dropout(0.2)])

    with pytest.raises(PipelineError, match=r"seed_generator_state' draws random numbers, for"):
        run_tf2(one_program(dropping), [X], num_devices="layers:2;model:2 d_ff:model", loss=first)


def split(layer, *inputs, rules=MODEL, size=2, loss=None):
    """Outputs, gradients of weights by name, and costs of a layer on processors along `model`."""
    mesh = Mesh.from_text(f"model:{size}")
    lowering = PlacementLowering(mesh, LayoutRules.from_text(rules), ["CPU:0"] * size)
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        py_utils.GetOrCreateGlobalStepVar()
        with lowering_scope(lowering), py_utils.VariableStore():
            layer = layer.Instantiate()

            @tf.function(autograph=False)
            def compute(*inputs):
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    y = layer.FPropDefaultTheta(*inputs)
                    y = y if isinstance(y, tf.Tensor) else ops.export_tensor(y)
                    total = tf.reduce_sum(tf.sin(y)) if loss is None else loss(y)
                return y, tape.gradient(total, [layer.vars.Flatten(), inputs])

            y, (grads, of_inputs) = compute(*map(tf.constant, inputs))
            named = {}
            for name, shape in layer.named_shapes.items():
                whole = named[name] = np.zeros(shape.sizes, np.float32)
                for part in layer.parts_of(name):
                    ends = zip(part.begin, part.sizes, strict=True)
                    number = [id(v) for v in layer.vars.Flatten()].index(id(layer.vars[part.name]))
                    if grads[number] is not None:
                        grad = tf.convert_to_tensor(grads[number])
                        whole[tuple(slice(begin, begin + n) for begin, n in ends)] = grad
            cut = sorted({n.split("_slice")[0] for n in layer.vars if "_slice_" in n})
            return [y, *of_inputs], named, cut, lowering.costs
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


def named_conv():
    return keras.layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")


CASES = {
    "dense": (lambda: keras.layers.Dense(12, "softplus"), [X], ["bias", "kernel"]),
    "narrow": (lambda: keras.layers.Dense(4), [X], ["kernel"]),
    "einsum": (
        lambda: keras.layers.EinsumDense("abc,cde->abde", [None, 4, 3], bias_axes="de"),
        [X],
        ["bias", "kernel"],
    ),
    "embedding": (lambda: keras.layers.Embedding(8, 3), [IDS], ["embeddings"]),
    "attention": (
        lambda: keras.layers.MultiHeadAttention(4, 2),
        [X, X[:, :3]],
        [f"{n}_{w}" for n in ("key", "query", "value") for w in ("bias", "kernel")]
        + ["attention_output_kernel"],
    ),
    "grouped": (
        lambda: keras.layers.GroupQueryAttention(2, 4, 2, use_bias=False),
        [X, X],
        ["attention_output_kernel", "query_kernel"],
    ),
    "norm": (lambda: keras.layers.LayerNormalization(), [X], []),
    "convolution": (named_conv, [IMAGES], ["bias", "kernel"]),
    "images": (
        lambda: keras.Sequential(
            [
                named_conv(),
                keras.layers.MaxPooling2D(2, padding="same"),
                keras.layers.Conv2D(4, 1),
                keras.layers.GlobalAveragePooling2D(),
            ]
        ),
        [IMAGES],
        ["conv2d_1_bias", "conv2d_1_kernel", "conv2d_bias", "conv2d_kernel"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_split_layer_equals_itself_whole(name):
    make, inputs, wanted = CASES[name]
    shapes = [(None, *x.shape[1:]) for x in inputs]
    results, grads, cut, _ = split(wrapped(name, make, shapes), *inputs)
    plain, plain_grads, whole, _ = split(wrapped(name, make, shapes), *inputs, size=1)
    assert (sorted(cut), whole) == (sorted(wanted), [])
    for a, b in zip(results, plain, strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, 1e-4, 1e-5)
    assert grads.keys() == plain_grads.keys()
    for weight, grad in grads.items():
        np.testing.assert_allclose(grad, plain_grads[weight], 1e-4, 1e-5, err_msg=weight)


def test_dense_and_attention_stay_split_inside():
    """The sums of Megatron-LM: one forward for each pair of products, and one backward."""
    for make, inputs in ((mlp, [X]), (lambda: keras.layers.MultiHeadAttention(4, 2), [X, X])):
        *_, costs = split(wrapped("inside", make, [(None, 4, 8)] * len(inputs)), *inputs)
        calls = {key[1:]: calls for key, (calls, _) in costs.rows.items()}
        assert calls.keys() == {("all_reduce", "forward"), ("all_reduce", "backward")}
        assert calls["all_reduce", "forward"] == 1
        assert calls["all_reduce", "backward"] == len(inputs)
        assert costs.total_bytes == (1 + len(inputs)) * X.nbytes


def test_dims_gives_weights_other_names():
    dims = {"dense/kernel": "embed;wide", "dense/bias": "wide", "dense_1": ""}
    *_, cut, _ = split(wrapped("mlp", mlp, dims=dims), X, rules="wide:model;d_ff:model")
    assert cut == ["dense_bias", "dense_kernel"]


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ({"query": "a;b"}, PipelineError, "dims has 'query', which matches no weight; the"),
        ({"dense/kernel": "a"}, ShapeError, r"dense/kernel' of sizes \[8, 16\] 'a'; give 2 names"),
        ({"dense/bias": "d_ff", "": "x"}, ShapeError, "give 2 names"),
        ({"dense/kernel": "a;a"}, ShapeError, "'a;a'; give 2 names, all different"),
    ],
    ids=["unused", "number", "everything", "twice"],
)
def test_wrong_dims_say_what_to_give(eagerly, dims, error, text):
    with pytest.raises(error, match=text):
        wrapped("mlp", mlp, dims=dims).Instantiate()


def test_heads_that_do_not_divide_are_an_error():
    layer = wrapped("three", lambda: keras.layers.MultiHeadAttention(3, 2), [(None, 4, 8)] * 2)
    with pytest.raises(LayoutError, match="heads"):
        split(layer, X, X)


def test_a_constraint_of_a_split_weight_is_an_error():
    layer = wrapped("non_neg", lambda: keras.layers.Dense(12, kernel_constraint="non_neg"))
    with pytest.raises(PipelineError, match=r"constraint, NonNeg, .* dims=\{'dense/kernel': ''\}"):
        split(layer, X)
    assert split(layer.Set(dims={"kernel": ""}), X)[2] == ["bias"]


class Function(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def behind_dense(name, function):
    """A function of 16 features, which are split."""
    return wrapped(
        name,
        lambda: keras.Sequential(
            [keras.Input([4, 8], 8), keras.layers.Dense(16), Function(function)]
        ),
        (),
    )


@tf.custom_gradient
def flip(x):
    return tf.identity(x), lambda grad: -grad


@pytest.mark.parametrize(
    ("function", "owner"),
    [(flip, "flip"), (tf.grad_pass_through(tf.round), "tensorflow.*_grad_pass_through_op")],
    ids=["own", "tensorflow"],
)
def test_a_custom_gradient_of_whole_tensors_is_an_error(function, owner):
    layer = behind_dense("flip", function)
    with pytest.raises(PipelineError, match=rf"named_flip: .* has a custom gradient, of .*{owner}"):
        split(layer, X)


def test_random_numbers_with_state_are_an_error():
    layer = behind_dense("noise", lambda x: x + tf.random.uniform([8, 4, 16]))
    with pytest.raises(PipelineError, match=r"RandomUniform operation.* keras.random.SeedGenerato"):
        split(layer, X)


@pytest.mark.filterwarnings("ignore:.*join a split tensor")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.einsum("abii->abi", tf.reshape(x, [8, 4, 4, 4])),
        lambda x: x * tf.cast(tf.reduce_mean(tf.cast(9 * x, tf.int32), 2, True), tf.float32),
        tf.nn.silu,
    ],
    ids=["diagonal", "integers", "silu"],
)
def test_operations_across_a_split_dim_equal_the_whole(function):
    layer = behind_dense("across", function)
    results, grads, cut, _ = split(layer, X)
    plain, plain_grads, *_ = split(layer, X, size=1)
    assert cut == ["bias", "kernel"]
    np.testing.assert_allclose(results[0], plain[0], 1e-4, 1e-5)
    for weight, grad in grads.items():
        np.testing.assert_allclose(grad, plain_grads[weight], 1e-4, 1e-4, err_msg=weight)


def test_a_loop_is_an_error():
    with pytest.raises(PipelineError, match=r"named_rnn: .* is a loop, .* unroll=True"):
        split(wrapped("rnn", lambda: keras.layers.SimpleRNN(4)), X)
    results, *_ = split(wrapped("rnn", lambda: keras.layers.SimpleRNN(4, unroll=True)), X)
    assert results[0].shape == (8, 4)


def test_a_layer_that_joins_a_split_tensor_is_named():
    def model():
        return keras.Sequential(
            [keras.layers.Dense(12), keras.layers.Softmax(name="scores"), keras.layers.Dense(3)]
        )

    with pytest.warns(UserWarning, match=r"named_soft: these layers join .*scores.* \(Softmax\)"):
        results, *_ = split(wrapped("soft", model), X)
    plain, *_ = split(wrapped("soft", model), X, size=1)
    np.testing.assert_allclose(results[0], plain[0], 1e-5, 1e-6)


def test_a_checkpoint_fits_every_layout(tmp_path):
    saved = {}
    for mesh in ("layers:2;model:2 d_ff:model", "layers:2", "layers:1;model:4 d_ff:model"):
        with executing(True, mesh):
            bounds = [0, 1, 2] if "layers:2" in mesh else [0, 2]
            stack = stack_of([wrapped(f"mlp{i}", mlp) for i in range(2)], bounds).Instantiate()
            variables = stack.vars.Flatten()
            named = by_logical_name(stack, variables)
            checkpoint = tf.train.Checkpoint(**{n.replace("/", "."): v for n, v in named.items()})
            if not saved:
                for variable in variables:
                    variable.assign(RNG.normal(size=variable.shape))
                saved["path"] = checkpoint.write(str(tmp_path / "ckpt"))
                saved["y"] = stack.FPropDefaultTheta(tf.constant(X)).numpy()
            else:
                checkpoint.read(saved["path"]).assert_consumed()
                y = stack.FPropDefaultTheta(tf.constant(X))
                np.testing.assert_allclose(y, saved["y"], 1e-4, 1e-5)


def model_with_skips():
    """Masks, a model inside, a residual beyond several layers, and two results."""
    ids = keras.Input([5], dtype="int32", name="ids")
    extra = keras.Input([5, 6], name="extra")
    x = keras.layers.Embedding(8, 6, mask_zero=True, name="table")(ids)
    skip = x = x + extra
    inner = keras.Sequential(
        [keras.Input([5, 6]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(6)]
    )
    x = inner(x)
    x = keras.layers.Dense(6, name="last")(x + skip)
    pooled = keras.layers.GlobalAveragePooling1D()(x, mask=keras.ops.not_equal(ids, 0))
    return keras.Model({"ids": ids, "extra": extra}, {"pooled": pooled, "x": x})


def test_a_model_is_taken_apart_and_computes_the_same():
    model = model_with_skips()
    layers = keras_layers(model)
    first, *_, last = [layer.name for layer in layers]
    assert (len(layers), first, last) == (4, "table", "last")
    extra = RNG.normal(size=[2, 5, 6]).astype(np.float32)
    wanted = model({"ids": IDS, "extra": extra})
    stack = PipeliningLayer.Params().Set(
        name="stack",
        cell_tpl=PartitionSequentialLayers(
            layers, 2, tshape.Shape([1, 5, 6]), tf.TensorSpec([1, 5], tf.int32)
        ),
        num_micro_batches=2,
    )
    with executing(True, "layers:2;model:2 d_ff:model;vocab:model"):
        found = stack.Instantiate().FPropDefaultTheta(tf.constant(extra), tf.constant(IDS))
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, 1e-5, 1e-6)


def test_masks_cross_the_borders_of_layers():
    inputs = keras.Input([5], dtype="int32")
    x = keras.layers.Embedding(8, 6, mask_zero=True)(inputs)
    x = keras.layers.MultiHeadAttention(2, 3)(x, x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    ids = np.array([[1, 2, 0, 0, 0], [3, 1, 2, 4, 0]], np.int32)
    layers = keras_layers(model)
    with executing(True, "layers:2;model:2 heads:model"):
        params = stack_of(layers, [0, 1, 3])
        y = params.Instantiate().FPropDefaultTheta(tf.constant(ids))
    np.testing.assert_allclose(y, model(ids), 1e-5, 1e-6)


def test_dropout_of_a_model_taken_apart_is_that_of_training(eagerly):
    model = keras.Sequential(
        [keras.Input([4, 8]), keras.layers.Dense(8), keras.layers.Dropout(0.5)]
    )
    params = stack_of(keras_layers(model), [0, 1])
    with executing(True, "layers:1"):
        y = params.Instantiate().FPropDefaultTheta(tf.constant(X)).numpy()
    assert 0.3 < np.mean(y == 0) < 0.7


def shared():
    dense = keras.layers.Dense(4, name="twice")
    x = keras.Input([4])
    return keras.Model(x, dense(keras.layers.Dense(4)(dense(x))))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (shared, r"'twice/kernel' of layer 'twice' in two places, .*; make a layer for each place"),
        (lambda: keras.Sequential([keras.layers.Dense(2)]), r"begin it with keras.Input\(shape\)"),
        (lambda: Block(), "a Block is no functional or sequential Keras model"),
    ],
    ids=["shared", "unbuilt", "subclass"],
)
def test_models_that_cannot_be_taken_apart(make, text):
    with pytest.raises(PipelineError, match=text):
        keras_layers(make())


def test_a_task_of_a_stack_has_the_loss_of_the_model(eagerly):
    model = keras.Sequential(
        [keras.Input([8]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3, "softmax")]
    )
    batch = py_utils.NestedMap(inputs=tf.constant(X[:, 0]), labels=tf.constant([0, 1, 2, 0] * 2))
    settings = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    stack = stack_of(keras_layers(model), [0, 1, 2], num_micro_batches=2)
    with executing(True, "layers:2;model:2 d_ff:model"):
        task = KerasTask.Params().Set(name="task", stack=stack, **settings).Instantiate()
        metrics, _ = task.FPropTower(task.theta, batch)
    y = model(batch.inputs)
    loss = keras.losses.sparse_categorical_crossentropy(batch.labels, y)
    np.testing.assert_allclose(metrics.loss[0], np.mean(loss), 1e-5)
    np.testing.assert_allclose(
        metrics.accuracy[0], np.mean(np.argmax(y, 1) == batch.labels.numpy()), 1e-6
    )
    with pytest.raises(PipelineError, match="model and stack are both set"):
        KerasTask.Params().Set(name="t", stack=stack, model=model, **settings).Instantiate()
    with pytest.raises(PipelineError, match="leave input_shapes out"):
        KerasTask.Params().Set(stack=stack, input_shapes=[[None, 8]], **settings).Instantiate()


def test_the_loss_of_a_stack_leaves_out_what_a_mask_does(eagerly):
    ids = keras.Input([5], dtype="int32")
    x = keras.layers.Embedding(8, 6, mask_zero=True)(ids)
    model = keras.Model(ids, keras.layers.Dense(3, "softmax")(keras.layers.LayerNormalization()(x)))
    batch = py_utils.NestedMap(inputs=tf.constant(IDS % 3), labels=tf.constant(IDS % 2))
    stack = stack_of(keras_layers(model), [0, 1, 3])
    settings = {"name": "task", "loss": "sparse_categorical_crossentropy"}
    with executing(True, "layers:2;model:2 vocab:model"):
        task = KerasTask.Params().Set(stack=stack, **settings).Instantiate()
        loss, weight = task.FPropTower(task.theta, batch)[0].loss
    y = model(batch.inputs)
    losses = keras.losses.sparse_categorical_crossentropy(batch.labels, y).numpy()
    assert float(weight) == np.sum(IDS % 3 != 0) < IDS.size
    np.testing.assert_allclose(loss, np.mean(losses[IDS % 3 != 0]), 1e-5)


def test_a_mixed_model_in_parts_keeps_its_float32_layers(eagerly):
    dense = keras.layers.Dense
    model = keras.Sequential(
        [
            keras.Input([8]),
            dense(16, dtype="mixed_bfloat16"),
            dense(16, dtype="float32"),
            dense(3, dtype="float32"),
        ]
    )
    model.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    with executing(True, "layers:2"):
        stack = stack_of(keras_layers(model), [0, 1, 3]).Instantiate()
        y = stack.FPropDefaultTheta(tf.constant(X[:, 0]))
    np.testing.assert_allclose(y, model(X[:, 0]), 1e-5, 1e-6)


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        return x * self.scale


def test_unnamed_weights_are_numbered_within_the_model(eagerly):
    for _ in range(2):
        layer = KerasLayer.Params().Set(name="scale", layer=Scale, input_shapes=[[None, 2]])
        with py_utils.VariableStore():
            assert list(layer.Instantiate().vars) == ["variable"]
