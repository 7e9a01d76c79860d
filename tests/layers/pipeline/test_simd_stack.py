"""Stacks of layers with named dims and their loss as one program train as the plain stack does."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers import PipeliningLayer, SeqLayer
from pipemesh.layers.named import Embedding, SoftmaxCrossEntropy
from pipemesh.lowering import ops
from pipemesh.recurrent import ActionClock
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline.stacks import first, stack_of
from tests.layers.pipeline.test_stage import Residual

VOCAB, WIDTH = 12, 4
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, [8, 6]).astype(np.int32)
LABELS = RNG.integers(0, VOCAB, [8, 6]).astype(np.int32)
WEIGHTS = RNG.uniform(size=[8, 6]).astype(np.float32)
INPUTS = [IDS, LABELS, WEIGHTS, None]
TIED = {"named_head.w": "named_embedding.table"}
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


class Embed(Embedding):
    def FProp(self, theta, ids, labels, weights, nothing):
        return super().FProp(theta, ids), labels, weights, nothing


class Masked(Residual):
    """Reads what goes along, and what travels though no layer changes it."""

    def FProp(self, theta, x, labels, weights, nothing):
        y = super().FProp(theta, x)
        odd = ops.cast(ops.equal(self.Named(labels, "batch;length"), 3), y.dtype)
        y = y + odd * 0.1 + self.Named(weights, "batch;length") * 0.1
        return y, labels, weights, nothing


class Head(SoftmaxCrossEntropy):
    def FProp(self, theta, x, labels, weights, nothing):
        assert nothing is None
        return super().FProp(theta, x, labels, weights)


class PlainHead(base_layer.BaseLayer):
    """A layer of lingvo, for which the devices' slices are joined."""

    def FProp(self, theta, x, labels, weights, nothing):
        squares = tf.reduce_sum(tf.square(x), -1) * weights
        return tf.reduce_sum(squares), tf.size(labels), squares


def layers_of(number=4, block=Masked, head=Head, **kwargs):
    sizes = {"vocab_size": VOCAB}
    embed = Embed.Params().Set(
        name="named_embedding", embedding_dim=WIDTH, dropout_rate=0.2, **sizes
    )
    head = head.Params().Set(name="named_head")
    if head.cls is not PlainHead:
        head.Set(input_dim=WIDTH, **sizes)
    blocks = [block.Params().Set(name=f"named_block{i}", **kwargs) for i in range(number)]
    return [embed, *blocks, head]


def stack(bounds, cls=PipeliningLayer, layers=None, tied=None, **kwargs):
    layers = layers or layers_of(bounds[-1] - 2)
    options = {"loss_inside": True, "lowering": "simd", "num_micro_batches": 2, **kwargs}
    return stack_of(layers, bounds, cls, tied, **options)


@functools.cache
def expected(run, number, tied=False):
    """The plain stack's results, computed once for each mode."""
    plain = stack([0, number], cls=SeqLayer, tied=TIED if tied else {})
    return run(plain, INPUTS, steps=3, loss=first)


SPLIT = "layers:2;data:2;model:2 vocab:model;d_ff:model"
LONG = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "tied", "options"),
    [
        (run_tf1, "layers:2", [0, 2, 4], False, {}),
        (run_eagerly, "layers:2;model:2 vocab:model", [0, 2, 4], False, {}),
        (run_tf2, SPLIT, [0, 2, 4], True, {}),
        (run_tf2, "layers:2", [0, 2, 3, 4, 6], False, {"schedule": "looped_bfs:2"}),
        pytest.param(run_tf1, SPLIT, [0, 3, 6], False, {}, marks=LONG),
        pytest.param(run_tf1, SPLIT, [0, 3, 6], True, {}, marks=LONG),
        pytest.param(run_tf2, "layers:4;data:2", [0, 2, 3, 4, 6], False, {}, marks=LONG),
        pytest.param(run_tf2, "layers:1", [0, 6], False, {"num_micro_batches": 1}, marks=LONG),
    ],
)
def test_everything_equals_the_plain_stack_with_dropout_on(run, mesh, bounds, tied, options):
    params = stack(bounds, tied=TIED if tied else {}, **options)
    found = run(params, INPUTS, steps=3, loss=first, num_devices=mesh)
    found.assert_close(expected(run_tf1 if run is run_tf1 else run_tf2, bounds[-1], tied), **CLOSE)


def test_evaluation_has_no_dropout_and_no_gradient():
    plain, found = (
        run_tf2(params, INPUTS, do_eval=True, loss=None, num_devices=devices)
        for params, devices in (
            (stack([0, 4], cls=SeqLayer), 1),
            (stack([0, 2, 4]), "layers:2;data:2"),
        )
    )
    found.assert_close(plain, **CLOSE)


def test_the_head_may_be_a_layer_of_lingvo():
    layers = layers_of(2, head=PlainHead)
    plain = run_tf2(stack([0, 4], cls=SeqLayer, layers=layers), INPUTS, loss=first)
    params, mesh = stack([0, 2, 4], layers=layers), "layers:2;model:2 d_ff:model"
    with pytest.warns(UserWarning, match="'s1_behind' has no layer with named dims"):
        found = run_tf2(params, INPUTS, loss=first, num_devices=mesh)
    found.outputs[1] = found.outputs[1].astype(np.int32)
    found.assert_close(plain, **CLOSE)


@pytest.mark.slow
def test_layers_compute_in_bfloat16_as_a_placement_does():
    found, wanted = (
        run_tf2(
            stack([0, 2, 4], fprop_dtype=tf.bfloat16, lowering=lowering),
            INPUTS,
            loss=first,
            num_devices=2,
        )
        for lowering in ("simd", "placement")
    )
    np.testing.assert_allclose(found.outputs[0], wanted.outputs[0], rtol=1e-3)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert found.grads[name].dtype == np.float32
        assert np.abs(found.grads[name] - grad).max() < 0.02 * np.abs(grad).max(), name


def test_each_weight_lies_with_its_stage_and_the_vocabulary_is_spread(eagerly):
    with cluster("layers:2;model:2 vocab:model;d_ff:model"):
        py_utils.GetOrCreateGlobalStepVar()
        layer = stack([0, 3, 6]).Instantiate()
        lies = {v.name.split("/var")[0]: v.device[-1] for v in layer.vars.Flatten()}
    parts = [f"named_block{i}/feed_forward/w_in_slice_{j}" for i in (0, 3) for j in (0, 1)]
    assert [lies[part] for part in parts] == ["0", "1", "2", "3"]
    tables = [f"named_embedding/table_slice_{j}" for j in (0, 1)]
    assert [lies[table] for table in tables] == ["0", "1"]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_an_error_that_says_so():
    bad = [IDS, LABELS, WEIGHTS * np.float32(np.nan), None]
    run = functools.partial(run_tf2, inputs=bad, do_eval=True, loss=None, num_devices=2)
    assert np.isnan(run(stack([0, 2, 4], check_numerics="off")).outputs[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="the loss is not finite"):
        run(stack([0, 2, 4]))


class Fickle(Masked):
    def FProp(self, theta, x, labels, weights, nothing):
        return super().FProp(theta, x, labels, weights, nothing)[0], labels + 1, weights, nothing


class Short(Masked):
    def FProp(self, theta, x, labels, weights, nothing):
        return super().FProp(theta, x, labels, weights, nothing)[:3]


class Weighty(Masked):
    """Has a layer inside whose weights have no names for dims."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("inner", Unnamed.Params())


class Unnamed(base_layer.BaseLayer):
    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        self.CreateVariable("w", py_utils.WeightParams([2], py_utils.WeightInit.Constant(1.0)))


@pytest.mark.parametrize(
    ("params", "mesh", "words"),
    [
        (stack([0, 2, 4], layers=layers_of(2, Fickle)), 2, "hand on what is not floating"),
        (stack([0, 2, 4], layers=layers_of(2, Short)), 2, "takes 4 arguments and returns 3"),
        (stack([0, 2, 4], layers=layers_of(2, Weighty)), 2, "weight 'w' of .*has no named dims"),
        (stack([0, 2, 3, 4, 6]), 2, "looped_bfs:2 has two stages a device"),
        (stack([0, 3, 6], num_micro_batches=3), 2, "cannot be cut into 3 equal microbatches"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*each place takes 2 in turn")
def test_what_cannot_be_one_program_is_an_error_before_the_first_step(params, mesh, words):
    with pytest.raises(PipelineError, match=words):
        run_tf2(params, INPUTS, loss=first, num_devices=mesh)


def test_weights_are_not_cut_over_the_axis_of_the_batch():
    with pytest.raises(LayoutError, match=r"rule 'embed:data' cuts weights .*'placement'"):
        run_tf2(stack([0, 2, 4]), INPUTS, loss=first, num_devices="layers:2;data:2 embed:data")


def test_a_clock_and_a_forecast_of_memory_are_errors():
    with cluster(2), tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        layer = stack([0, 3, 6]).Instantiate()
        inputs = [None if x is None else tf.constant(x) for x in INPUTS]
        with pytest.raises(PipelineError, match="memory is predicted for lowering='placement'"):
            layer.PredictMemory(*inputs)
        layer.clock = ActionClock()
        with pytest.raises(PipelineError, match="a clock is set"):
            layer.FPropDefaultTheta(*inputs)


@pytest.mark.exhaustive
def test_the_graph_does_not_grow_with_the_microbatches():
    def size(number):
        with cluster(2), tf.Graph().as_default() as graph:
            py_utils.GetOrCreateGlobalStepVar()
            layer = stack([0, 3, 6], num_micro_batches=number).Instantiate()
            inputs = [None if x is None else tf.constant(x) for x in INPUTS]
            tf.gradients(layer.FPropDefaultTheta(*inputs)[0], layer.vars.Flatten())
            return len(graph.as_graph_def().node)

    assert size(2) == size(8)
