"""Pipelines under placement equal the plain model; what cannot be a pipeline is an error."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.lowering import ops
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.scope import Position, WholeDraws
from pipemesh.recurrent.circular import SimdPipeline
from pipemesh.recurrent.circular.layer_position import layer_seed
from pipemesh.recurrent.circular.simd_pipeline import StageWeight
from tests.recurrent.circular.pipelined_mlp import LAYERS, differences, under_placement


# M >= S with two stages a core; M < S; one core.
@pytest.mark.parametrize(
    ("mesh_text", "microbatches", "virtual"),
    [
        ("layers:2", 4, 2),
        ("layers:4", 1, 1),
        pytest.param("data:1", 4, 2, marks=pytest.mark.exhaustive),
        pytest.param("layers:4", 8, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_all_gradients_equal_the_plain_model(mesh_text, microbatches, virtual):
    pipeline = SimdPipeline(Mesh.from_text(mesh_text), LAYERS, microbatches, virtual)
    assert not differences(pipeline, under_placement(pipeline))


# Small pipelines of one layer or two.


def make(mesh_text="layers:2", rules="layers:layers", first_device=0):
    mesh = Mesh.from_text(mesh_text)
    devices = [f"CPU:{first_device + i}" for i in range(mesh.num_devices)]
    return PlacementLowering(mesh, LayoutRules.from_text(rules), devices)


LOWERING, OTHER = make(), make("data:1", "")
WIDE = make(rules="layers:layers;wide:layers")


def imported(lowering, shape, value=1.0):
    shape = Shape.from_text(shape) if isinstance(shape, str) else shape
    return ops.import_tensor(lowering, tf.fill(shape.sizes, value), shape)


def add(x, weights, position):
    return x + weights["w"]


def run(layer=add, x="batch:4;io:2", w="io:2", lowering=LOWERING, weights=None, **options):
    pipeline = SimdPipeline(lowering.mesh, **{"num_layers": 2, "num_microbatches": 2, **options})
    x = imported(lowering, x) if isinstance(x, str) else x
    weights = weights or {"w": imported(lowering, pipeline.stacked(w))}
    return pipeline(layer, x, weights)


@pytest.mark.parametrize("batch_dim", ["batch", "examples"])
def test_any_dim_can_be_the_batch(batch_dim):
    y = run(x=f"io:2;{batch_dim}:4", batch_dim=batch_dim)
    assert y.shape.names == ("io", batch_dim)
    np.testing.assert_array_equal(ops.export_tensor(y), 3 * np.ones([2, 4]))


def with_gradients(function, values):
    with tf.GradientTape() as tape:
        tape.watch(values)
        y = function(*values)
    return [y, *map(tf.convert_to_tensor, tape.gradient(y, values))]


def assert_alike(meshed, plain, *values):
    """Compares results and gradients; the gradients are of the sum of the results."""
    values = list(map(tf.constant, values))
    got = tf.function(with_gradients, autograph=False)(meshed, values)
    for a, b in zip(got, with_gradients(plain, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def random(*sizes):
    return np.random.default_rng(sum(sizes)).standard_normal(sizes).astype(np.float32)


def test_what_comes_before_and_after_may_be_split_over_the_stages_too():
    lowering = make("layers:2", "layers:layers;vocab:layers")
    ids = np.array([5, 0, 3, 3])
    pipeline = SimdPipeline(lowering.mesh, num_layers=2, num_microbatches=2)

    def meshed(table, w):
        rows = ops.import_tensor(lowering, table, "vocab:6;io:3")
        stack = ops.import_tensor(lowering, w[None, :, None], pipeline.stacked("io:3"))
        x = ops.gather(rows, ops.import_tensor(lowering, ids, "batch:4"), "vocab")
        y = pipeline(add, x, {"w": stack})
        logits = ops.log_softmax(ops.einsum([y, rows], ["batch", "vocab"]), "vocab")
        return ops.export_tensor(ops.reduce_sum(ops.square(logits)))

    def plain(table, w):
        y = tf.gather(table, ids) + w[0] + w[1]
        return tf.reduce_sum(tf.nn.log_softmax(y @ tf.transpose(table)) ** 2)

    assert_alike(meshed, plain, random(6, 3), random(2, 3))


def test_a_stage_and_its_gradient_are_computed_on_its_own_device():
    lowering = make("layers:2;model:2", "layers:layers;hidden:model", first_device=1)
    pipeline = SimdPipeline(lowering.mesh, num_layers=2, num_microbatches=2)
    shapes = [Shape.of(batch=4, io=2), *map(pipeline.stacked, ("io:2;hidden:6", "hidden:6;io:2"))]

    def layer(x, w, position):
        hidden = ops.einsum([x, w["wi"]], ["batch", "hidden"])
        return ops.einsum([hidden, w["wo"]], ["batch", "io"])

    @tf.function(autograph=False)
    def step(*slices):
        with tf.GradientTape() as tape:
            tape.watch(slices)
            x, wi, wo = (Tensor(lowering, s, sh) for s, sh in zip(slices, shapes, strict=True))
            y = pipeline(layer, x, {"wi": wi, "wo": wo})
        return tape.gradient(y.slices, slices)

    with record_placement() as graphs:
        step(*(imported(lowering, shape).slices for shape in shapes))
    nodes = [node for graph in graphs.partition_graphs for node in graph.node]
    products = collections.Counter(node.device[-1] for node in nodes if "MatMul" in node.op)
    # Two forward; backward the first again, whose result the second needs, and two for each.
    assert products == dict.fromkeys("1234", 7)


def test_communication_is_counted_for_every_tick():
    lowering = make("layers:2;data:2", "layers:layers;batch:data")
    pipeline = SimdPipeline(lowering.mesh, num_layers=2, num_microbatches=4)

    @tf.function(autograph=False)
    def step(x, w):
        xs = ops.import_tensor(lowering, x, "batch:8;io:3")
        ws = ops.import_tensor(lowering, w, pipeline.stacked("io:3"))
        return tf.gradients(pipeline(add, xs, {"w": ws}).slices, ws.slices)

    step.get_concrete_function(tf.TensorSpec([8, 3]), tf.TensorSpec([1, 2, 1, 3]))
    ticks, activations, weight = 5, 4 * 3 * 4, 3 * 4
    sent = ticks * activations // 4
    assert lowering.costs.rows == {
        (("layers",), "permute", "forward"): (ticks, sent),
        (("layers",), "permute", "backward"): (ticks, sent),
        (("layers",), "all_reduce", "forward"): (1, activations),
        # Not at every tick.
        (("data",), "all_reduce", "backward"): (1, weight),
    }


def test_a_tensor_from_outside_would_lose_its_gradient():
    def step(value, change):
        tensor = change(ops.import_tensor(LOWERING, value, "io:2"))
        return ops.export_tensor(run(lambda x, w, p: x + tensor))

    step = tf.function(step, autograph=False)
    value = tf.constant([1.0, 2.0])
    np.testing.assert_array_equal(step(value, ops.stop_gradient)[0], [3, 5])
    with pytest.raises(PipelineError, match="from outside, which would get no gradient"):
        step(value, lambda tensor: tensor)


def talking(x, weights, position):
    table = ops.import_tensor(x.lowering, tf.ones([2, 4]), "io:2;wide:4")
    hidden = ops.einsum([x, table], ["batch", "wide"])
    return ops.einsum([hidden, table], ["batch", "io"])


def with_weight(lowering, shape, value=1.0):
    return run(weights={"w": imported(lowering, shape, value)})


X, TWO_STAGES = imported(LOWERING, "batch:4;io:2"), "layers:2;layers_of_stage:1;io:2"


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (PipelineError, lambda: run(num_layers=3), "multiple of 2"),
        (
            PipelineError,
            lambda: run(x=imported(LOWERING, "batch:4;io:2", 1)),
            "the input has dtype int32; .* other tensors go along",
        ),
        (PipelineError, lambda: run(x=()), "empty tuple"),
        (PipelineError, lambda: run(num_microbatches=0), "num_microbatches is 0"),
        (PipelineError, lambda: run(num_microbatches=3), "4 examples, 4 on each .* multiple of 3"),
        (ShapeError, lambda: run(batch_dim="bach"), "did you mean 'batch'"),
        (LayoutError, lambda: run(x="batch:4;layers:2"), "dim 'layers'"),
        (LayoutError, lambda: run(lowering=make(rules="")), "add the rule 'layers:layers'"),
        (
            LayoutError,
            lambda: run(x="batch:4;wide:2", lowering=WIDE),
            "dim 'wide'.* axis 'layers'",
        ),
        (
            PipelineError,
            lambda: run(talking, lowering=WIDE),
            "communicates along axis 'layers'",
        ),
        (
            PipelineError,
            lambda: run(lambda x, w, p: ops.cast(x, tf.float64)),
            "returned .*float64",
        ),
        (PipelineError, lambda: run(lambda x, w, p: x.slices[0]), "the shape and dtype of"),
        (PipelineError, lambda: run(lambda x, w, p: x[0], (X, X)), "all layers are alike"),
        (LayoutError, lambda: SimdPipeline(OTHER.mesh, 2, 2)(add, X, {}), "for mesh 'data:1'"),
        (
            PipelineError,
            lambda: with_weight(LOWERING, f"virtual_stages:2;{TWO_STAGES}"),
            "begin with the dims 'virtual_stages:1;layers:2",
        ),
        (PipelineError, lambda: with_weight(LOWERING, "layers:2;io:2"), "begin with the dims"),
        (
            PipelineError,
            lambda: with_weight(OTHER, "io:2"),
            "weights are floating tensors of the lowering",
        ),
        (PipelineError, lambda: with_weight(LOWERING, "io:2", 1), "int32"),
    ],
)
def test_what_cannot_be_a_pipeline_is_an_error_that_says_why(error, call, message):
    with pytest.raises(error, match=message):
        call()


# Random numbers.


@pytest.mark.parametrize(
    ("mesh_text", "rules"),
    [("layers:1", ""), ("layers:2;data:2", "layers:layers;batch:data")],
)
def test_every_layer_and_every_microbatch_has_the_mask_of_the_plain_model(mesh_text, rules):
    seeds = tf.constant([7, 1]), tf.constant([7, 2])

    def layer(x, weights, position):
        x = ops.dropout(x, rate=0.5, seed=seeds[0]) + weights["w"]
        return position.dropout(x, rate=0.5, seed=seeds[1])

    y = run(layer, "batch:8;io:16", "io:16", make(mesh_text, rules), num_microbatches=4)
    x = tf.ones([8, 16])
    for number in range(2):
        first, second = (
            tf.nn.experimental.stateless_dropout(
                tf.ones([8, 16]), 0.5, layer_seed(seed, number), rng_alg="philox"
            )
            for seed in seeds
        )
        x = (x * first + 1) * second
    np.testing.assert_array_equal(ops.export_tensor(y), x)


def plain_draw(x, weights, position):
    noise = tf.random.stateless_uniform([2, 2], [1, 2])
    return x + ops.import_tensor(x.lowering, noise, x.shape)


def drawn_in_map(x, weights, position):
    slices = x.lowering.map(lambda part: tf.nn.dropout(part, 0.5), x.slices)
    return Tensor(x.lowering, slices, x.shape)


@tf.function
def traced_before(x):
    return tf.nn.dropout(x, 0.5)


def drawn_in_a_function(x, weights, position):
    return Tensor(x.lowering, x.lowering.map(traced_before, x.slices), x.shape)


@pytest.mark.parametrize("layer", [plain_draw, drawn_in_map, drawn_in_a_function])
def test_draws_of_plain_tensorflow_in_a_layer_function_are_errors(layer):
    traced_before(tf.ones([2, 2]))
    for lowering in (make("layers:1", ""), LOWERING):
        with pytest.raises(LayoutError, match=r"uniform_v2|random_uniform.*draw with ops\.dropout"):
            run(layer, lowering=lowering)


def test_a_pipeline_in_a_stage_of_another_pipeline_may_not_draw():
    where = Position(tf.constant(0, tf.int64), 2, 4, WholeDraws({}, lambda name, dim, folded: 1))
    with (
        plan_free_randomness(tf.constant(0, tf.int64), where),
        pytest.raises(PipelineError, match="inside of a stage of another pipeline"),
    ):
        run()


# Several activations, and what goes along.


@pytest.mark.slow
def test_several_activations_travel_and_others_go_along():
    lowering = make("layers:2;data:2", "layers:layers;batch:data")
    pipeline = SimdPipeline(lowering.mesh, 4, num_microbatches=4)
    segments = np.arange(8, dtype=np.int32) % 2

    def layer(x, weights, position, segments):
        first, second = x
        seen = ops.cast(ops.equal(segments, 1), tf.float32)
        scaled = first * weights["w"]
        return scaled + second, second + ops.reduce_sum(scaled, "io") * seen

    def plain(first, second, w):
        for each in tf.unstack(w):
            scaled = first * each
            seen = tf.cast(segments == 1, tf.float32)
            first, second = scaled + second[:, None], second + tf.reduce_sum(scaled, 1) * seen
        return tf.reduce_sum(tf.sin(first)) + tf.reduce_sum(second)

    def meshed(first, second, w):
        x = (
            ops.import_tensor(lowering, first, "batch:8;io:2"),
            ops.import_tensor(lowering, second, "batch:8"),
        )
        shape = pipeline.stacked("io:2")
        weights = {"w": ops.import_tensor(lowering, tf.reshape(w, shape.sizes), shape)}
        along = [ops.import_tensor(lowering, segments, "batch:8")]
        y = [ops.export_tensor(leaf) for leaf in pipeline(layer, x, weights, along)]
        return tf.reduce_sum(tf.sin(y[0])) + tf.reduce_sum(y[1])

    assert_alike(meshed, plain, random(8, 2), random(8), random(4, 2))


# Gradients of weights.


def gradients(layer, x, weights, cotangent):
    """Of weights; those with two elements are a number for each of two layers."""
    pipeline = SimdPipeline(LOWERING.mesh, num_layers=2, num_microbatches=len(x))

    @tf.function(autograph=False)
    def step(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            tensors = {}
            for name, value in weights.items():
                own = value.shape.num_elements() == 2
                shape = pipeline.stacked("") if own else ""
                value = tf.reshape(value, [1, 2, 1]) if own else value
                tensors[name] = ops.import_tensor(LOWERING, value, shape)
            y = pipeline(layer, ops.import_tensor(LOWERING, x, f"batch:{x.shape[0]}"), tensors)
            y = ops.export_tensor(y)
        return tape.gradient(y, weights, cotangent, tf.UnconnectedGradients.ZERO)

    return tf.nest.map_structure(lambda t: t.numpy().tolist(), step(x, weights))


def test_many_small_gradients_of_bfloat16_are_not_lost():
    ones = tf.ones([8], tf.bfloat16)
    cotangent = tf.constant([1, 1, 1, 1, 1, 1, 1, 256], tf.bfloat16)
    weights = {"w": tf.zeros([2], tf.bfloat16)}
    got = gradients(lambda x, w, _: x + w["w"], ones, weights, cotangent)
    # 263, rounded once; in bfloat16 256 + 1 is 256.
    assert got == {"w": [264, 264]}


@pytest.mark.parametrize("eager", [False, True])
def test_weights_of_one_layer_of_all_and_of_none_have_their_gradients(eager, monkeypatch):
    if eager:
        monkeypatch.setattr(tf, "function", lambda **_: lambda function: function)
    x = tf.constant([1.0, 3.0])
    weights = {"own": tf.constant([2.0, 5.0]), "all": tf.constant(3.0), "none": tf.ones([2])}
    got = gradients(lambda x, w, _: x * w["own"] * w["all"], x, weights, tf.ones([2]))
    assert got == {"own": [4 * 5 * 9, 4 * 2 * 9], "all": 4 * 10 * 6, "none": [0, 0]}


def test_a_weight_is_told_apart_where_it_meets_examples_and_where_not():
    lowering = make("layers:2;data:2", "layers:layers;batch:data")
    pipeline = SimdPipeline(lowering.mesh, num_layers=2, num_microbatches=2)
    cotangent = random(3, 8).T

    def layer(x, w, position):
        # A normed weight: its norm is equal along `data`, where the examples differ.
        return x * w["w"] / ops.sqrt(ops.reduce_sum(ops.square(w["w"]), "io"))

    def meshed(x, w):
        x = ops.import_tensor(lowering, x, "batch:8;io:3")
        w = ops.import_tensor(lowering, w[None, :, None], pipeline.stacked("io:3"))
        return ops.export_tensor(pipeline(layer, x, {"w": w})) * cotangent

    def plain(x, w):
        for i in range(2):
            x = x * w[i] / tf.norm(w[i])
        return x * cotangent

    assert_alike(meshed, plain, random(8, 3), random(2, 3))


@pytest.mark.parametrize(
    ("mesh_text", "x", "later", "whole", "partial"),
    [
        # Each copy gets what its own examples add.
        ("data:2", "data:4;io:2", ("data",), None, [[2, 4], [10, 12]]),
        # Other axes are summed at once.
        ("data:2;model:2", "data:4;model:2;io:2", ("data",), None, [[12, 16]] * 2 + [[44, 48]] * 2),
        # So is what meets only one of two later axes.
        ("data:2;model:2", "data:4;io:2", ("data", "model"), [[12, 16]] * 4, None),
        # A use that does not vary.
        ("data:2", None, ("data",), [[2, 4]] * 2, None),
    ],
)
def test_gradients_of_weights_that_are_summed_later(mesh_text, x, later, whole, partial):
    mesh = Mesh.from_text(mesh_text)
    lowering = make(mesh_text, ";".join(f"{axis}:{axis}" for axis in mesh.axis_names))
    values, shape = tf.constant([1.0, 2.0]), Shape.of(io=2)
    slices, copies = (ops.import_tensor(lowering, values, shape).slices for _ in range(2))
    weight = StageWeight(lowering, slices, shape, copies, later)
    with tf.GradientTape() as tape:
        tape.watch([slices, copies])
        if x is None:
            y = ops.square(weight)
        else:
            sizes = Shape.from_text(x).sizes
            values = np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)
            y = ops.import_tensor(lowering, values, x) * weight
        y = ops.reduce_sum(y)
    for found, want in zip(
        tape.gradient(y.slices, [slices, copies]), (whole, partial), strict=True
    ):
        if want is None:
            assert set(found) == {None}
        else:
            np.testing.assert_array_equal(found, want)
