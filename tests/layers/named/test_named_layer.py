"""Variables of named layers, params and inputs that they refuse, and whole lengths."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer
from pipemesh.layers.named import (
    Attention,
    BatchNorm,
    Convolution,
    Dropout,
    Embedding,
    Experts,
    FeedForward,
    NamedLayer,
    Norm,
    SoftmaxCrossEntropy,
    TransformerBlock,
    lowering_scope,
)
from pipemesh.lowering import ops
from tests.layers.harness import cluster, run_tf1, run_tf2
from tests.layers.named.harness import join, make_lowering, run, value_of, weights_of

GAUSSIAN = py_utils.WeightInit.Gaussian(0.5)


class Product(NamedLayer):
    """A layer for tests: `embed` times weights gives `d_ff`."""

    @classmethod
    def NamedWeights(cls, p):
        return {"w": ("embed:4;d_ff:8", GAUSSIAN), "b": ("embed:4", GAUSSIAN)}

    def FProp(self, theta, x):
        x = self.Named(x, "batch;embed") + self.Weight(theta, "b")
        return ops.einsum([x, self.Weight(theta, "w")], ["batch", "d_ff"])


class Pair(NamedLayer):
    """One product and a list of others."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("first", Product.Params())
        self.CreateChildren("rest", [Product.Params().Set(name=f"rest{i}") for i in range(2)])

    @classmethod
    def NamedWeights(cls, p):
        return {"scale": ("d_ff:8", GAUSSIAN)}


PRODUCT = Product.Params().Set(name="product")
X = value_of("x", [4, 4])


def make(params, lowering):
    with cluster(1), lowering_scope(lowering), py_utils.VariableStore():
        py_utils.GetOrCreateGlobalStepVar()
        return params.Copy().Instantiate()


@pytest.fixture(autouse=True)
def _eagerly(eagerly):
    del eagerly


def whole_weights(params, mesh):
    lowering = make_lowering(mesh)
    layer = make(params, lowering)
    variables = dict(layer.vars.FlattenItems())
    return {
        path: join(sizes, layout, [variables[name].numpy() for name in names])
        for path, (sizes, layout, names) in weights_of(layer, lowering).items()
    }


def test_each_different_slice_is_a_variable_on_the_device_of_its_first_processor():
    layer = make(PRODUCT, make_lowering("data:2;model:2"))
    holders = {name: part.holders for name, part in layer.weight_parts().items()}
    found = {
        name: (v.shape.as_list(), v.device[-5:], holders[name])
        for name, v in layer.vars.FlattenItems()
    }
    assert found == {
        "b": ([4], "CPU:0", (0, 1, 2, 3)),
        "w_slice_0": ([4, 4], "CPU:0", (0, 2)),
        "w_slice_1": ([4, 4], "CPU:1", (1, 3)),
    }
    assert layer.dims() == {"batch", "length", "embed", "d_ff"}
    # Without splits variables have the logical names.
    whole = make(PRODUCT, make_lowering("model:1"))
    assert sorted(v.name for v in whole.vars.Flatten()) == ["product/b/var:0", "product/w/var:0"]


def test_initial_values_depend_on_name_and_seed_and_not_on_the_layout():
    params = Pair.Params().Set(name="pair", random_seed=7)
    whole, found = whole_weights(params, "model:1"), whole_weights(params, "data:2;model:4")
    assert whole.keys() == found.keys() and len(whole) == 7
    for path, value in whole.items():
        np.testing.assert_array_equal(found[path], value)
    other = whole_weights(params.Copy().Set(random_seed=8), "model:1")
    assert (whole["first.w"] != whole["rest[0].w"]).all()
    assert (whole["first.w"] != other["first.w"]).all()
    assert 0.3 < whole["first.w"].std() < 0.7


def test_each_copy_that_the_caller_made_has_the_whole_gradient():
    lowering = make_lowering("data:2;model:2")
    layer = make(PRODUCT, lowering)
    held = {
        name: tuple(tf.identity(layer.vars[name]) for _ in part.holders)
        for name, part in layer.weight_parts().items()
    }
    with lowering_scope(lowering), tf.GradientTape() as tape:
        tape.watch(held)
        y = ops.export_tensor(layer.FProp(py_utils.NestedMap(held), tf.constant(X)))
        loss = tf.reduce_sum(y * value_of("cotangent 0", y.shape))
    whole = run(PRODUCT, [X], initial=True)
    np.testing.assert_allclose(y, whole.outputs[0], 1e-5, 1e-6)
    b, w = whole.grads["b"], whole.grads["w"]
    wanted = {"b": [b] * 4, "w_slice_0": [w[:, :4]] * 2, "w_slice_1": [w[:, 4:]] * 2}
    for name, grads in tape.gradient(loss, held).items():
        np.testing.assert_allclose(grads, wanted[name], 1e-5, 1e-6, err_msg=name)


def test_weights_that_do_not_fit_are_errors():
    layer = make(PRODUCT, make_lowering("data:2;model:2"))
    copies = py_utils.NestedMap(layer.theta, w_slice_0=(layer.vars.w_slice_0,) * 3, b=(X[0],))
    for mesh, name, error, message in [
        ("data:2;model:2", "b", ShapeError, "'b' was given as 1 tensors, .* for 4 processors"),
        ("data:2;model:2", "w", ShapeError, r"given as 3 copies, but processors \[0, 2\]"),
        ("model:4", "w", LayoutError, "'w' of layer 'product' was created in 2 slices, .* has 4"),
        ("model:1", "c", ShapeError, "no weight 'c'; known: 'w', 'b'"),
    ]:
        with lowering_scope(make_lowering(mesh)), pytest.raises(error, match=message):
            layer.Weight(copies, name)


def test_inputs_of_another_lowering_or_with_other_dims_are_errors():
    lowering = make_lowering("model:1")
    layer = make(PRODUCT, lowering)
    x = ops.import_tensor(lowering, X, "batch:4;embed:4")
    with pytest.raises(LayoutError, match="of one lowering, inside of the scope of another"):
        layer.Named(x, "batch;embed")
    with lowering_scope(lowering):
        with pytest.raises(ShapeError, match="takes dims 'batch;io', but was given 'batch:4;embed"):
            layer.Named(x, "batch;io")
        with pytest.raises(ShapeError, match=r"a tensor of 1 dims, of sizes \(4,\); tf.reshape it"):
            layer.Named(tf.ones([4]), "batch;embed")
        assert layer.Named(x, "embed;batch").shape.names == ("embed", "batch")


def test_an_input_of_another_width_is_refused_in_one_line():
    """A width of 6 was TensorFlow's error, and one of 1 an error about a slice."""
    lowering = make_lowering("model:1", "embed:model")
    params = TransformerBlock.Params().Set(name="b", input_dim=8, num_heads=2, hidden_dim=4)
    layer = make(params, lowering)
    for width, message in (
        (6, r"'batch:2;length:3;embed:6', but its weight .* is 'embed:8'; set [^\n]*$"),
        (1, r"input_dim\) to 1, or give an input of 8"),
    ):
        with lowering_scope(lowering), pytest.raises(ShapeError, match=message):
            layer.FPropDefaultTheta(tf.ones([2, 3, width]))


def test_a_rule_for_a_dim_that_no_layer_has_is_warned_of():
    """The rule `attention_heads:model` split nothing, and nothing was said."""
    lowering = make_lowering("model:2", "attention_heads:model")
    layer = make(Attention.Params().Set(name="a", input_dim=4, num_heads=2), lowering)
    with lowering_scope(lowering):
        y = layer.FPropDefaultTheta(tf.ones([1, 2, 4]))
    with pytest.warns(UserWarning, match=r"no tensor .* has had; .*mean 'heads:model'"):
        y.numpy()


@pytest.mark.parametrize("init", [py_utils.WeightInit.Xavier(1.0), None])
def test_initial_values_that_have_no_blocks_are_an_error(init):
    class Other(NamedLayer):
        @classmethod
        def NamedWeights(cls, p):
            return {"w": ("embed:4", init)}

    with pytest.raises(PipelineError, match=r"weight 'other/w': init is .* drawn slice by slice"):
        make(Other.Params().Set(name="other"), make_lowering("model:1"))


SIZES = {
    Attention: {"input_dim": 8, "num_heads": 4, "dim_per_head": 2},
    Convolution: {"input_dim": 3, "output_dim": 4},
    Dropout: {},
    Embedding: {"vocab_size": 8, "embedding_dim": 4},
    Experts: {"input_dim": 5, "hidden_dim": 2, "num_experts": 4},
    FeedForward: {"input_dim": 6, "hidden_dim": 8},
    BatchNorm: {"input_dim": 8},
    Norm: {"input_dim": 8},
    SoftmaxCrossEntropy: {"input_dim": 5, "vocab_size": 8},
}


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (Attention, {"block_size": 0}, "block_size is 0"),
        (Attention, {"num_heads": 3, "dim_per_head": None}, "input_dim 8 is no multiple of num_h"),
        (Attention, {"num_kv_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        (Attention, {"relative_buckets": 1}, "relative_buckets is 1"),
        (Attention, {"rotary_base": 0}, "rotary_base is 0; it must be a number above 0"),
        (Attention, {"rotary_scaling": 3.0}, "give a RotaryScaling, or None"),
        (Attention, {"use_bias": "no"}, "use_bias is 'no'"),
        (Attention, {"use_rotary": True, "dim_per_head": 3}, "have 3; make dim_per_head even"),
        (Convolution, {"activation": "SWIGLU"}, "activation is 'SWIGLU'"),
        (Convolution, {"output_dim": 0}, "output_dim"),
        (Convolution, {"padding": "same"}, "padding is 'same'; did you mean 'SAME'"),
        (Convolution, {"residual": True}, "residual adds the input .* input_dim 3, output_dim 4"),
        (Convolution, {"strides": (1, 0)}, "strides"),
        (Convolution, {"window": 3}, r"window is 3; give one to three numbers, as in \(3, 3\)"),
        (Convolution, {"strides": (2,)}, r"strides are \(2,\); .* as many as window \(3, 3\) has"),
        (Dropout, {"rate": -0.1}, "rate is -0.1; .* below 1"),
        (Dropout, {"rate": 1.0}, "rate is 1.0; .* below 1"),
        (Dropout, {"rate": "half"}, "rate is 'half'; .* below 1"),
        (Embedding, {"positions": "learned"}, "max_length is None"),
        (Embedding, {"positions": "learnt"}, "positions is 'learnt'; did you mean 'learned'"),
        (Embedding, {"positions": "sinusoidal", "embedding_dim": 3}, "is 3; .* an even one"),
        (Experts, {"activation": "RELLU"}, "did you mean 'RELU'"),
        (Experts, {"capacity_factor": 0}, "factor is 0; it must be a number above 0, or None"),
        (Experts, {"num_choices": 3}, "num_choices is 3; a token meets 1 or 2 of the 4"),
        (Experts, {"num_experts": 1}, "num_choices is 2; a token meets 1 or 2 of the 1"),
        (FeedForward, {"activation": "glu"}, "activation is 'glu'; did you mean 'GELU'"),
        (FeedForward, {"name": ""}, r"a FeedForward has no name; .*Set\(name='\.\.\.'"),
        (Norm, {"direct_scale": "no"}, "direct_scale is 'no'; it must be True or False"),
        (Norm, {"epsilon": 0}, "epsilon is 0; it must be a number above 0"),
        (BatchNorm, {"decay": 2}, "decay is 2; give a number from 0 to 1"),
        (BatchNorm, {"kind": "rms"}, "kind is 'rms'"),
        (
            Norm,
            {"kind": "group", "num_groups": 3},
            "num_groups=3 does not divide input_dim=8; give a divisor",
        ),
        (Norm, {"num_groups": 2}, "kind is 'layer' and num_groups=2, .*set kind='group'"),
        (Norm, {"kind": "layr"}, "kind is 'layr'; did you mean 'layer'"),
        (SoftmaxCrossEntropy, {"label_smoothing": -0.1}, "label_smoothing is -0.1; .* below 1"),
        (SoftmaxCrossEntropy, {"label_smoothing": 1.0}, "label_smoothing is 1.0; .* below 1"),
        (SoftmaxCrossEntropy, {"label_smoothing": None}, "label_smoothing is None; .* below 1"),
    ],
)
def test_params_that_do_not_fit_are_errors(cls, changes, message):
    with pytest.raises(PipelineError, match=message):
        cls.Params().Set(**{"name": "layer", **SIZES[cls], **changes}).Instantiate()


GROUPS = {"num_kv_heads": 2}


@pytest.mark.parametrize(
    ("cls", "mesh", "rules", "changes", "message"),
    [
        (Attention, "model:2", "memory_length:model", {}, "splits dim 'memory_length'.*remove the"),
        (
            Attention,
            "cp:4;model:2",
            "length:cp;heads:model",
            {"split_length_by": "heads"},
            "a processor has 2 heads and 2 of keys, which axis 'cp' .* does not divide; set it to",
        ),
        (Attention, "model:2", "kv_heads:model", GROUPS, "'heads' has no rule; .* lie with"),
        (
            Attention,
            "a:2;b:2",
            "heads:a;kv_heads:b",
            GROUPS,
            "'heads' is split over 'a'; .* write 'heads:b;kv_heads:b'",
        ),
        (
            Attention,
            "model:2",
            "heads:model",
            {"num_heads": 6, "num_kv_heads": 3},
            "leaves a processor 3 heads, of which 2 share a key",
        ),
        (Attention, "a:4", "heads:a", {"num_heads": 6}, "'heads' of .* size 6, which .* into 4"),
        # Split rows were routed slice by slice, each with the room of the whole row: wrong numbers.
        (Experts, "a:2", "length:a", {}, "'length:a' splits dim 'length', .* remove"),
        (Experts, "a:2", "router:a", {}, "'router:a' splits dim 'router', .* remove"),
        (Experts, "a:2", "room:a", {}, "'room:a' splits dim 'room', .* remove"),
    ],
)
def test_layouts_that_do_not_fit_are_errors_before_anything_runs(
    cls, mesh, rules, changes, message
):
    with lowering_scope(make_lowering(mesh, rules)), pytest.raises(LayoutError, match=message):
        cls.Params().Set(name="layer", **{**SIZES[cls], **changes}).Instantiate()


BATCH, LENGTH, EMBED = 4, 8, 16


def meta(layout, size):
    params = TransformerBlock.Params().Set(
        name="block", input_dim=EMBED, num_heads=4, hidden_dim=32, dropout_rate=0.1
    )
    # Queries, keys and values, and both products of a gate, send one gradient together.
    params.feed_forward_tpl.activation = "SWIGLU"
    with lowering_scope(make_lowering(f"model:{size}", layout)):
        return TransformerBlock.FPropMeta(params, tshape.Shape([BATCH, LENGTH, EMBED]))


# What is sent and kept is what is counted (tests/conformance).
@pytest.mark.parametrize("size", [2, 4])
def test_it_sends_what_megatrons_four_all_reduces_send(size):
    whole, split = (
        meta(layout, size)
        for layout in ("heads:model;d_ff:model", "length:model;heads:model;d_ff:model")
    )
    activation = BATCH * LENGTH * EMBED * 4
    share = activation * (size - 1) // size
    axes = ("model",)
    assert whole.communication.rows == {
        (axes, "all_reduce", "forward"): (2, 2 * 2 * share),
        (axes, "all_reduce", "backward"): (2, 2 * 2 * share),
    }
    # Gradients of what is added to parts of tokens, or scales them: 2 norms and 2 biases.
    vectors = 6
    assert split.communication.rows == {
        **{
            (axes, primitive, which): (2, 2 * share)
            for primitive in ("all_gather", "reduce_scatter")
            for which in ("forward", "backward")
        },
        (axes, "all_reduce", "backward"): (vectors, vectors * 2 * EMBED * 4 * (size - 1) // size),
    }
    # Of each: two normalized tensors, their scales, and two masks, which all devices had.
    tokens = BATCH * LENGTH
    less = (size - 1) * 2 * (tokens * EMBED * 4 + tokens * 4 + tokens * EMBED)
    assert whole.activation_bytes - split.activation_bytes == less


@pytest.mark.parametrize(
    ("run", "layer", "sizes", "mesh", "remat"),
    [
        pytest.param(
            run_tf2,
            FeedForward.Params().Set(input_dim=EMBED, hidden_dim=32, dropout_rate=0.3),
            [BATCH, LENGTH, EMBED],
            "layers:2;data:2;model:2 length:model;d_ff:model",
            "full",
            marks=pytest.mark.slow,
        ),
        (
            run_tf1,
            Convolution.Params().Set(input_dim=3, output_dim=3, residual=True),
            [BATCH, 8, 6, 3],
            "layers:2;data:2;rows:2 height:rows",
            "none",
        ),
    ],
)
def test_slices_go_from_stage_to_stage(run, layer, sizes, mesh, remat):
    layers = [layer.Copy().Set(name=f"named_{i}") for i in range(2)]
    cells = [FeatureExtractionLayer.Params().Set(name=f"s{p.name}", sub=[p]) for p in layers]
    plain = SeqLayer.Params().Set(name="stack", cell_tpl=cells)
    split = PipeliningLayer.Params().Set(
        name="stack", cell_tpl=cells, num_micro_batches=2, remat=remat
    )
    x = value_of("x", sizes)
    wanted, found = run(plain, [x]), run(split, [x], num_devices=mesh)
    found.assert_close(wanted, rtol=2e-4, atol=2e-5)


def test_a_variable_is_not_used_again_by_a_layer_that_draws_it_otherwise():
    with cluster(1), lowering_scope(make_lowering("data:1", "")), py_utils.VariableStore():
        PRODUCT.Copy().Set(random_seed=1).Instantiate()
        with pytest.raises(AssertionError, match="seed"):
            PRODUCT.Copy().Set(random_seed=2).Instantiate()
