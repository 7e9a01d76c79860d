"""Costs of layers, and stages cut by them."""

import re

import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils, tshape

from pipemesh.errors import PartitionError
from pipemesh.layers import (
    FeatureExtractionLayer,
    FunctionLayer,
    PartitionSequentialLayers,
    PipeliningLayer,
)
from pipemesh.layers import partition_layers as costs_module
from pipemesh.layers.named import TransformerBlock
from pipemesh.layers.partition_layers import layer_costs, named_layers
from pipemesh.partition import partition
from pipemesh.schedule import build, simulate, zb_v
from tests.layers.blocks import WIDTH, Weighted, blocks
from tests.layers.harness import executing

ROWS, LENGTH, FLOAT, MICROBATCHES = 2, 3, 4, 4
X = tshape.Shape([ROWS, LENGTH, WIDTH])
IDS = tf.TensorSpec([ROWS, LENGTH], tf.int32)
VOCAB = 50


class Embed(Weighted):
    """Ids to vectors; the ids go on as labels."""

    shape = (VOCAB, WIDTH)

    def FProp(self, theta, ids):
        return tf.gather(theta.w, ids), ids

    @classmethod
    def FPropMeta(cls, p, ids):
        vectors = tshape.Shape([ids[0], ids[1], WIDTH])
        return py_utils.NestedMap(flops=1, out_shapes=(vectors, ids))


def of_function(function, flops):
    return FunctionLayer.Params().Set(name="f", function=function, flops=lambda *_: flops)


EMBED = Embed.Params().Set(name="embed")
# Keeps its output, where the next layer keeps its input: one tensor.
TANH = of_function(lambda x, labels: (tf.nn.tanh(x), labels), 10)
SQUARE = of_function(lambda x, labels: (tf.square(x), labels), 10)
LOSS = of_function(
    lambda x, labels: (tf.reduce_sum(tf.square(x)), tf.cast(tf.size(labels), tf.float32)), 5
)


def test_bytes_are_those_of_weights_outputs_and_what_backward_passes_read():
    """Layers of two functions were taken for alike: the second one had the bytes of the first."""
    embed, square, tanh, loss = layer_costs([EMBED, SQUARE, TANH, LOSS], IDS)
    vectors, ids = ROWS * LENGTH * WIDTH * FLOAT, ROWS * LENGTH * 4
    assert [cost.forward for cost in (embed, square, tanh, loss)] == [1, 10, 10, 5]
    assert (embed.parameter_bytes, embed.boundary_bytes) == (VOCAB * WIDTH * FLOAT, vectors + ids)
    # A square needs its input, a tanh its output, which the square of the loss needs too.
    assert (square.activation_bytes, square.shared_bytes) == (vectors, 0)
    assert (tanh.activation_bytes, tanh.shared_bytes) == (vectors, 0)
    assert (loss.activation_bytes, loss.shared_bytes) == (vectors, vectors)
    assert (loss.parameter_bytes, loss.boundary_bytes) == (0, 2 * FLOAT)
    assert [cost.name for cost in (embed, loss)] == ["cell_000", "cell_003"]


def test_layers_that_are_alike_are_traced_once_and_nothing_is_left_behind(monkeypatch):
    traced = []
    trace = costs_module._trace
    monkeypatch.setattr(
        costs_module,
        "_trace",
        lambda layer, *rest: traced.append(layer.name) or trace(layer, *rest),
    )
    with tf.Graph().as_default() as graph:
        found = layer_costs(blocks(5), X)
        assert not graph.get_operations()
    assert traced == ["cell_000"]
    assert len({cost.activation_bytes for cost in found}) == 1


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved:2"])
def test_predicted_bytes_are_those_that_the_pipeline_predicts(name):
    number, boundaries = 4, (0, 1, 4, 6, 7)
    params = named_layers([EMBED, SQUARE, TANH, SQUARE, TANH, SQUARE, LOSS])
    costs = layer_costs(params, IDS)
    table = build(name, number // (2 if ":" in name else 1), MICROBATCHES)
    plan = partition(
        costs,
        number,
        **simulate(table).for_partition(),
        # Gradients and no optimizer, which the pipeline does not know.
        optimizer_bytes_per_parameter_byte=1,
        fixed=dict(enumerate(boundaries[1:-1], start=1)),
    )
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=[params[j] for j in stage])
        for i, stage in enumerate(plan.stages)
    ]
    stack = PipeliningLayer.Params().Set(
        name="stack", cell_tpl=cells, schedule=table, loss_inside=True, remat="none"
    )
    stack.num_micro_batches = MICROBATCHES
    with executing(False, table.num_devices):
        batch = tf.TensorSpec([ROWS * MICROBATCHES, LENGTH], tf.int32)
        found = [memory.total for memory in stack.Instantiate().PredictMemory(batch)]
    if ":" in name:
        # Peaks of a device's stages are added though they need not coincide.
        assert all(b <= a <= 1.5 * b for a, b in zip(plan.device_memory, found, strict=True))
    else:
        # None but a sparse gradient, which is less than the weight, differs.
        assert list(plan.device_memory) == pytest.approx(found, rel=0.05)


class Says(base_layer.BaseLayer):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("said", {}, "What FPropMeta says besides.")
        return p

    def FProp(self, theta, x):
        raise AssertionError("it was traced")

    @classmethod
    def FPropMeta(cls, p, x):
        said = {"flops": 1, "out_shapes": (x,), **p.said}
        return py_utils.NestedMap({k: v for k, v in said.items() if v is not None})


def says(**said):
    return [Says.Params().Set(said=said)] * 2


def test_what_fprop_meta_says_is_taken_and_need_not_be_traced():
    params = says(parameter_bytes=10, activation_bytes=20)
    cost, _ = layer_costs(params, X)
    assert (cost.parameter_bytes, cost.activation_bytes) == (10, 20)
    assert cost.boundary_bytes == ROWS * LENGTH * WIDTH * FLOAT
    half, _ = layer_costs(params, X, fprop_dtype=tf.bfloat16)
    assert 2 * half.boundary_bytes == cost.boundary_bytes


@pytest.mark.parametrize(
    ("params", "shapes", "message"),
    [
        (
            says(),
            [X],
            r"'cell_000' \(Says\) was traced .*float32 \[2, 3, 4\].*it was trac",
        ),
        (
            [EMBED],
            [tshape.Shape([2, 3])],
            r"'cell_000' \(Embed\) was traced .* must be given as tf.TensorSpec\(shape, dtype\)",
        ),
        (says(parameter_bytes=-1), [X], "returns parameter_bytes=-1; it"),
    ],
)
def test_errors_name_the_layer_and_what_it_was_given(params, shapes, message):
    with pytest.raises(PartitionError, match=re.compile(message, re.DOTALL)):
        layer_costs(params, *shapes)


def test_measured_costs_are_seconds_and_bytes_are_the_same():
    spec = tf.TensorSpec([8, 4])
    [counted, _], [measured, twin] = (
        layer_costs([DENSE, DENSE], spec, measured=flag) for flag in (False, True)
    )
    assert 0 <= measured.forward < 10 and 0 <= measured.backward < 10
    assert measured.forward == twin.forward
    for name in ("parameter_bytes", "activation_bytes", "boundary_bytes"):
        assert getattr(measured, name) == getattr(counted, name)
    with tf.Graph().as_default(), pytest.raises(PartitionError, match="outside of any graph"):
        layer_costs([DENSE], spec, measured=True)


@pytest.mark.parametrize("dtype", [None, tf.bfloat16])
def test_layers_with_named_dims_say_what_the_pipeline_would_trace(dtype):
    block = TransformerBlock.Params().Set(input_dim=8, num_heads=2, hidden_dim=12)
    [cost] = layer_costs([block], tshape.Shape([2, 3, 8]), fprop_dtype=dtype)
    stage = FeatureExtractionLayer.Params().Set(name="stage", sub=[block.Copy().Set(name="b")])
    params = PipeliningLayer.Params().Set(
        name="pipe", cell_tpl=[stage], remat="none", check_numerics="off", fprop_dtype=dtype
    )
    with executing(False):
        layer = params.Instantiate()
        [device] = layer.PredictMemory(tf.TensorSpec([2, 3, 8]))
    assert cost.activation_bytes == device.kept
    sizes = [variable.shape.num_elements() for variable in layer.vars.Flatten()]
    assert cost.parameter_bytes == FLOAT * sum(sizes)


DENSE_WIDTH = 4
DENSE_SHAPE = tshape.Shape([8, DENSE_WIDTH])


class Layer(Weighted):
    """A product that says what it costs; its table of `rows` is nothing but large."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("rows", 1, "Rows of the table.")
        p.Define("flops", 1.0, "What FPropMeta says.")
        return p

    @property
    def shape(self):
        return self.params.rows, DENSE_WIDTH

    def FProp(self, theta, x):
        return tf.square(x) * tf.reduce_sum(theta.w)

    @classmethod
    def FPropMeta(cls, p, x):
        return py_utils.NestedMap(flops=p.flops, out_shapes=(x,))


def stack(number=8, huge=None):
    layers = [Layer.Params().Set(name="layer") for _ in range(number)]
    if huge is not None:
        layers[huge].rows = 1000
    return layers


def cut(params, number, shape=DENSE_SHAPE, **options):
    return [len(s.sub) for s in PartitionSequentialLayers(params, number, shape, **options)]


@pytest.fixture
def nothing_traced(monkeypatch):
    def trace(layer, *_):
        raise AssertionError(f"{layer.name} was traced")

    monkeypatch.setattr(costs_module, "_trace", trace)


def test_a_huge_embedding_gets_a_stage_of_its_own_under_a_memory_limit():
    layers = stack(huge=0)
    assert cut(layers, 2) == [4, 4]
    table = 1000 * DENSE_WIDTH * FLOAT
    # What a layer keeps is much less than the table, but four layers keep too much beside it.
    options = {"num_microbatches": 4, "optimizer_bytes_per_parameter_byte": 0}
    tight = cut(layers, 2, memory_limit=table + 1500, schedule="gpipe", **options)
    assert tight[0] < 4 and sum(tight) == 8
    with pytest.raises(PartitionError, match=r"stage 0 \(layer 0 \('cell_000'\)\) needs"):
        cut(layers, 2, memory_limit=table / 2, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 4]),
        ({"speeds": [1, 3]}, [2, 6]),
        ({"max_layers": 5, "fixed": [3]}, [3, 5]),
        ({"same_stage": [[1, 5]]}, [6, 2]),
        ({"remat": "except_last"}, [3, 5]),
        ({"schedule": "gpipe", "num_microbatches": 2, "remat": "except_last"}, [4, 4]),
    ],
)
def test_options_that_ask_for_no_bytes_trace_nothing(options, expected, nothing_traced):
    assert cut(stack(), 2, **options) == expected


def test_tables_place_stages_wherever_they_lie(nothing_traced):
    layers = stack()
    layers[0].flops = 4.0
    for options in (
        {"schedule": zb_v(2, 4)},
        {"schedule": "zb_v", "num_microbatches": 4},
        {"schedule": "zb_v", "num_microbatches": 4, "speeds": [1, 1]},
    ):
        first, second, third, fourth = cut(layers, 4, **options)
        # Device 0 has the first stage and the last one.
        assert {first + 3 + fourth, second + third} == {5, 6}
    assert cut(layers, 4, num_virtual_stages=2, max_layers=3) != []


def test_a_slow_link_is_crossed_where_little_crosses():
    class Narrow(Layer):
        def FProp(self, theta, x):
            return super().FProp(theta, x)[:, :1]

        @classmethod
        def FPropMeta(cls, p, x):
            return py_utils.NestedMap(flops=p.flops, out_shapes=(tshape.Shape([x[0], 1]),))

    layers = stack(6)
    layers[3] = Narrow.Params().Set(name="narrow")
    assert cut(layers, 2) == [3, 3]
    # Four bytes take as long as a flop.
    assert cut(layers, 2, bandwidth=4.0) == [4, 2]


NO_META = base_layer.BaseLayer.Params()
DENSE = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)


@pytest.mark.parametrize(
    ("params", "num_stages", "shapes", "message"),
    [
        ([NO_META] * 2, 2, [X], r"'cell_000' \(BaseLayer\) has no FPropMeta, .*define it"),
        (says(flops=None), 2, [X], r"'cell_000' \(Says\): FPropMeta returns .*flops="),
        (says(flops="a"), 2, [X], "FPropMeta returns .*flops=a number"),
        (says(out_shapes=X), 2, [X], "returns out_shapes .*a tuple of"),
        (says(flops=-1), 2, [X], r"costs\[0\] is -1"),
        ([DENSE] * 2, 2, [], "FPropMeta, given no shapes, failed with TypeError"),
        ([DENSE] * 2, 2, [[8, 4]], r"the shape of input 0 is \[8, 4\], a list; write .*tshape"),
        ([DENSE] * 2, 2, [], "given no shapes, .*; give a tshape.Shape for each input of the fi"),
        (
            [DENSE] * 2,
            2,
            [tshape.Shape([8, 5])],
            r"failed with AssertionError: assert inputs\[-1\] == p.input_dim; do the shapes fit",
        ),
        (
            [DENSE.Copy().Set(fprop_dtype="bf16")],
            1,
            [DENSE_SHAPE],
            "layer 0 of .*: fprop_dtype is 'bf16'",
        ),
        ([DENSE] * 2, 2, [None], "given None, failed with .* do the shapes fit"),
        ([DENSE], 2, [DENSE_SHAPE], "num_stages is 2, but 1 layers"),
        ([DENSE] * 2, "2", [DENSE_SHAPE], "num_stages is '2', but must be a whole number"),
        ([], 2, [DENSE_SHAPE], "costs is empty"),
        (None, 2, [DENSE_SHAPE], r"what is to be cut is None, not the Params of a layer"),
        ([Layer], 1, [DENSE_SHAPE], r"what is to be cut is .*; write Layer\.Params\(\)"),
    ],
)
def test_a_stack_that_cannot_be_cut_is_a_partition_error(params, num_stages, shapes, message):
    with pytest.raises(PartitionError, match=message):
        PartitionSequentialLayers(params, num_stages, *shapes)


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (2, {"memorylimit": 3}, "'memorylimit' is no option; did you mean 'memory_limit'"),
        (3, {"schedule": zb_v(2, 4)}, "schedule has 4 stages, but num_stages is 3"),
        (4, {"schedule": zb_v(2, 4), "num_microbatches": 8}, "has 4 microbatches, but num_micro"),
        (4, {"schedule": "zb_v"}, "simulated to count what its stages hold; give num_microb"),
        (2, {"memory_limit": 10}, "memory_limit needs num_microbatches"),
        (2, {"speeds": [1]}, "speeds has 1 numbers for 2 devices"),
    ],
)
def test_options_are_checked(number, options, message):
    with pytest.raises(PartitionError, match=message):
        cut(stack(), number, **options)


def test_measured_costs_decide_where_flops_mislead():
    layers = stack(4)
    layers[0].flops = 1000.0
    assert cut(layers, 2) == [1, 3]
    assert sum(cut(layers, 2, tf.TensorSpec([8, DENSE_WIDTH]), measured=True)) == 4


def test_a_wrong_schedule_is_an_error_before_layers_are_measured(monkeypatch):
    monkeypatch.setattr("pipemesh.layers.partition_layers.layer_costs", lambda *_, **__: 1 / 0)
    dense = layers.FCLayer.Params().Set(name="a", input_dim=4, output_dim=4)
    with pytest.raises(PartitionError, match="unknown schedule 'nope'"):
        PartitionSequentialLayers(
            [dense] * 2, 2, tshape.Shape([8, 4]), measured=True, schedule="nope"
        )
