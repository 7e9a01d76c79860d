"""Variables of named layers, tensors made of them, and whole lengths."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer
from pipemesh.layers.named import (
    Attention,
    FeedForward,
    NamedLayer,
    TransformerBlock,
    lowering_scope,
)
from pipemesh.layers.named.named_layer import split_names, whole_dims, whole_names
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh
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
        path: join(layout, [variables[name].numpy() for name in names])
        for path, (layout, names) in weights_of(layer, lowering).items()
    }


def test_each_different_slice_is_a_variable_on_the_device_of_its_first_processor():
    layer = make(PRODUCT, make_lowering("data:2;model:2"))
    found = {name: (v.shape.as_list(), v.device[-5:]) for name, v in layer.vars.FlattenItems()}
    assert found == {
        "b": ([4], "CPU:0"),
        "w_slice_0": ([4, 4], "CPU:0"),
        "w_slice_1": ([4, 4], "CPU:1"),
    }


def test_without_splits_variables_have_the_logical_names():
    layer = make(PRODUCT, make_lowering("model:1"))
    assert sorted(v.name for v in layer.vars.Flatten()) == ["product/b/var:0", "product/w/var:0"]


def test_initial_values_do_not_depend_on_the_layout():
    params = Pair.Params().Set(name="pair", random_seed=7)
    whole, found = whole_weights(params, "model:1"), whole_weights(params, "data:2;model:4")
    assert whole.keys() == found.keys() and len(whole) == 7
    for path, value in whole.items():
        np.testing.assert_array_equal(found[path], value)


def test_initial_values_depend_on_name_and_seed():
    values = whole_weights(Pair.Params().Set(name="pair", random_seed=7), "model:1")
    again = whole_weights(Pair.Params().Set(name="pair", random_seed=8), "model:1")
    assert (values["first.w"] != values["rest[0].w"]).all()
    assert (values["first.w"] != again["first.w"]).all()
    assert 0.3 < values["first.w"].std() < 0.7


def test_a_layer_says_which_processors_hold_its_variables():
    layer = make(Pair.Params().Set(name="pair"), make_lowering("data:2;model:2"))

    def holders(layer):
        return {name: part.holders for name, part in layer.weight_parts().items()}

    assert holders(layer) == {"scale_slice_0": (0, 2), "scale_slice_1": (1, 3)}
    product = {"b": (0, 1, 2, 3), "w_slice_0": (0, 2), "w_slice_1": (1, 3)}
    assert holders(layer.first) == product
    assert sorted(layer.first.weight_parts()) == sorted(layer.theta.first)
    assert {"batch", "length"} < layer.dims()


def test_a_call_may_have_other_devices_than_the_layer_was_made_with():
    there = make_lowering("data:2;model:2", first_device=4)
    found = run(PRODUCT, [X], "data:2;model:2", calls=there)
    found.assert_close(*(lambda whole: (whole.outputs, whole.grads))(run(PRODUCT, [X])))


def test_copies_that_the_caller_made_are_taken_as_they_are():
    lowering = make_lowering("data:2;model:2")
    layer = make(PRODUCT, lowering)
    held = {}
    for name, processors in {"b": range(4), "w_slice_0": (0, 2), "w_slice_1": (1, 3)}.items():
        held[name] = tuple(tf.identity(layer.vars[name]) for _ in processors)

    @tf.function(autograph=False)
    def run_with(copies):
        with lowering_scope(lowering), tf.GradientTape() as tape:
            tape.watch(copies)
            y = ops.export_tensor(layer.FProp(py_utils.NestedMap(copies), tf.constant(X)))
            loss = tf.reduce_sum(y * value_of("cotangent 0", y.shape))
        return y, tape.gradient(loss, copies)

    y, grads = run_with(held)
    whole = run(PRODUCT, [X], scale=None)
    np.testing.assert_allclose(y, whole.outputs[0], 1e-5, 1e-6)
    # Each copy has the whole gradient.
    for copy in grads["b"]:
        np.testing.assert_allclose(copy, whole.grads["b"], 1e-5, 1e-6)
    for k, name in enumerate(["w_slice_0", "w_slice_1"]):
        for copy in grads[name]:
            np.testing.assert_allclose(copy, whole.grads["w"][:, 4 * k : 4 * k + 4], 1e-5, 1e-6)


def test_a_core_of_simd_is_given_its_own_slices():
    layer = make(PRODUCT, make_lowering("model:2"))
    parts = {name: variable.read_value() for name, variable in layer.vars.FlattenItems()}

    def program(lowering, x, w, b):
        theta = py_utils.NestedMap(w=(w,), b=b)
        with lowering_scope(lowering), tf.GradientTape() as tape:
            tape.watch([w, b])
            y = layer.FProp(theta, x)
            loss = ops.reduce_sum(y * ops.import_tensor(lowering, cotangent, y.shape))
        # The loss of a core is a copy of the whole one.
        return ops.export_tensor(y), *tape.gradient(loss.slices[0], [w, b])

    cotangent = value_of("cotangent 0", [4, 8])
    cores = Cores(Mesh.from_text("model:2"), ["CPU:0", "CPU:1"])
    rules = LayoutRules.from_text("d_ff:model")
    specs = [tf.TensorSpec(shape) for shape in ([4, 4], [4, 4], [4])]
    call = cores.function(program, rules, *specs)
    results = call([[X, parts[f"w_slice_{core}"], parts["b"]] for core in range(2)])
    whole = run(PRODUCT, [X], scale=None)
    for core, (y, w, b) in enumerate(results):
        np.testing.assert_allclose(y, whole.outputs[0], 1e-5, 1e-6)
        np.testing.assert_allclose(w, whole.grads["w"][:, 4 * core : 4 * core + 4], 1e-5, 1e-6)
        np.testing.assert_allclose(b, whole.grads["b"], 1e-5, 1e-6)


def test_tuples_of_another_length_and_slices_for_a_core_are_errors():
    lowering = make_lowering("data:2;model:2")
    layer = make(PRODUCT, lowering)
    copies = py_utils.NestedMap(layer.theta, w_slice_0=(layer.vars.w_slice_0,) * 3, b=(X[0],))
    with lowering_scope(lowering):
        with pytest.raises(ShapeError, match=r"'b' was given as 1 tensors, .* for 4 processors"):
            layer.Weight(copies, "b")
        with pytest.raises(ShapeError, match=r"given as 3 copies, but processors \[0, 2\]"):
            layer.Weight(copies, "w")


def test_a_layer_called_under_a_mesh_that_splits_it_otherwise_is_an_error():
    layer = make(PRODUCT, make_lowering("model:2"))
    with (
        lowering_scope(make_lowering("model:4")),
        pytest.raises(
            LayoutError, match=r"'w' of layer 'product' was created in 2 slices, .* has 4"
        ),
    ):
        layer.FPropDefaultTheta(tf.constant(X))


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


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: tf.ones([2, 3, 6]), r"'batch:2;length:3;embed:6', but its weight .* is 'embed:8"),
        (lambda: tf.ones([2, 3, 1]), r"input_dim\) to 1, or give an input of 8"),
        (lambda: tf.ones([3, 8]), "a tensor of 2 dims, of sizes"),
        (lambda: tf.ones([2, 3, 8, 1]), "a tensor of 4 dims, of sizes"),
    ],
)
def test_an_input_of_another_width_or_rank_is_refused(use, message):
    """A width of 6 was TensorFlow's error, and one of 1 an error about a slice."""
    lowering = make_lowering("model:1", "embed:model")
    params = TransformerBlock.Params().Set(name="b", input_dim=8, num_heads=2, hidden_dim=4)
    layer = make(params, lowering)
    with lowering_scope(lowering), pytest.raises(ShapeError, match=message) as found:
        layer.FPropDefaultTheta(use())
    assert "\n" not in str(found.value)


def test_a_layer_without_name_is_refused():
    with pytest.raises(PipelineError, match=r"a FeedForward has no name; .*Set\(name='\.\.\.'"):
        FeedForward.Params().Set(input_dim=2, hidden_dim=2).Instantiate()


def test_a_rule_for_a_dim_that_no_layer_has_is_warned_of():
    """The rule `attention_heads:model` split nothing, and nothing was said."""
    rules = LayoutRules.from_text("attention_heads:model")
    lowering = PlacementLowering(Mesh.from_text("model:2"), rules, ["CPU:0", "CPU:1"])
    layer = make(Attention.Params().Set(name="a", input_dim=4, num_heads=2), lowering)
    with lowering_scope(lowering):
        y = layer.FPropDefaultTheta(tf.ones([1, 2, 4]))
    with pytest.warns(UserWarning, match=r"no tensor .* has had; .*mean 'heads:model'"):
        y.numpy()


def test_an_unknown_weight_is_an_error_with_the_nearest_name():
    layer = make(
        FeedForward.Params().Set(name="f", input_dim=2, hidden_dim=2), make_lowering("a:1")
    )
    with pytest.raises(ShapeError, match="no weight 'w_inn'; did you mean 'w_in'"):
        layer.Weight(layer.theta, "w_inn")


@pytest.mark.parametrize("init", [py_utils.WeightInit.Xavier(1.0), None])
def test_initial_values_that_have_no_blocks_are_an_error(init):
    class Other(NamedLayer):
        @classmethod
        def NamedWeights(cls, p):
            return {"w": ("embed:4", init)}

    with pytest.raises(PipelineError, match=r"weight 'other/w': init is .* drawn slice by slice"):
        make(Other.Params().Set(name="other"), make_lowering("model:1"))


BATCH, LENGTH, EMBED, HIDDEN = 4, 8, 16, 32
MEGATRON = "heads:model;d_ff:model"
SPLIT = f"length:model;{MEGATRON}"
SEQUENCES = value_of("x", [BATCH, LENGTH, EMBED])


def block(**changes):
    return TransformerBlock.Params().Set(
        name="block", input_dim=EMBED, num_heads=4, hidden_dim=HIDDEN, **changes
    )


def meta(layout, size):
    mesh = Mesh.from_text(f"model:{size}")
    lowering = PlacementLowering(
        mesh, LayoutRules.from_text(layout), [f"CPU:{i}" for i in range(size)]
    )
    with lowering_scope(lowering):
        params = block(dropout_rate=0.1)
        return TransformerBlock.FPropMeta(params, tshape.Shape([BATCH, LENGTH, EMBED]))


@pytest.mark.parametrize("size", [2, 4])
def test_it_sends_what_megatrons_four_all_reduces_send(size):
    whole, split = meta(MEGATRON, size).communication, meta(SPLIT, size).communication
    activation = BATCH * LENGTH * EMBED * 4
    share = activation * (size - 1) // size
    axes = ("model",)
    assert whole.rows == {
        (axes, "all_reduce", "forward"): (2, 2 * 2 * share),
        (axes, "all_reduce", "backward"): (2, 2 * 2 * share),
    }
    # Gradients of what is added to parts of tokens, or scales them: 2 norms and 2 biases.
    vectors = 6
    assert split.rows == {
        **{
            (axes, primitive, which): (2, 2 * share)
            for primitive in ("all_gather", "reduce_scatter")
            for which in ("forward", "backward")
        },
        (axes, "all_reduce", "backward"): (vectors, vectors * 2 * EMBED * 4 * (size - 1) // size),
    }


def test_less_is_kept_for_the_backward_pass():
    whole, split = meta(MEGATRON, 4).activation_bytes, meta(SPLIT, 4).activation_bytes
    # Of each: two normalized tensors, their scales, and two masks, which four devices had.
    tokens = BATCH * LENGTH
    assert whole - split == 3 * 2 * (tokens * EMBED * 4 + tokens * 4 + tokens * EMBED)


def test_names_of_dims():
    rules = LayoutRules.from_text(SPLIT)
    assert whole_names(rules, "heads") == {"length": "tokens"}
    assert whole_names(rules, "vocab") == {}
    assert whole_names(LayoutRules.from_text("length:rows;heads:model"), "heads") == {}
    assert split_names({"length": "tokens"}) == {"tokens": "length"}
    assert whole_dims("batch;length;embed", {"length": "tokens"}) == "batch;tokens;embed"


def test_attention_needs_whole_sequences_of_its_heads():
    with pytest.raises(LayoutError, match=r"'length:model' splits dim 'length'.*add 'heads:model'"):
        meta("length:model;d_ff:model", 2)


@pytest.mark.parametrize(
    ("run", "mesh", "options"),
    [
        pytest.param(run_tf2, "layers:2;data:2;model:2", {"remat": "full"}, marks=pytest.mark.slow),
        (run_tf1, "layers:2;model:2", {"remat": "none"}),
    ],
)
def test_slices_of_tokens_go_from_stage_to_stage(run, mesh, options):
    def stack(cls, **changes):
        layer = FeedForward.Params().Set(input_dim=EMBED, hidden_dim=HIDDEN, dropout_rate=0.3)
        layers = [layer.Copy().Set(name=f"named_{i}") for i in range(2)]
        cells = [FeatureExtractionLayer.Params().Set(name=f"s{p.name}", sub=[p]) for p in layers]
        return cls.Params().Set(name="stack", cell_tpl=cells, **changes)

    wanted = run(stack(SeqLayer), [SEQUENCES])
    params = stack(PipeliningLayer, num_micro_batches=2, **options)
    found = run(params, [SEQUENCES], num_devices=f"{mesh} length:model;d_ff:model")
    np.testing.assert_allclose(found.outputs[0], wanted.outputs[0], rtol=1e-4, atol=1e-5)
    found.assert_close(wanted, rtol=2e-4, atol=2e-5)


def test_a_variable_is_not_used_again_by_a_layer_that_draws_it_otherwise():
    with cluster(1), lowering_scope(make_lowering("data:1", "")), py_utils.VariableStore():
        PRODUCT.Copy().Set(random_seed=1).Instantiate()
        with pytest.raises(AssertionError, match="seed"):
            PRODUCT.Copy().Set(random_seed=2).Instantiate()
