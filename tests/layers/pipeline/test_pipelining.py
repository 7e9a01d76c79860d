"""PipeliningLayer equals the plain stack and keeps what lingvo users rely on."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils, tshape

from pipemesh.errors import PipelineError
from pipemesh.layers import PartitionSequentialLayers, SeqLayer
from tests.layers.blocks import WIDTH, Block, Counter, Weighted, blocks
from tests.layers.harness import evaluated, executing, run_eagerly, run_tf1, run_tf2
from tests.layers.stacks import EXACT, cells_of, equal_to_plain, plain, stack_of

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 3, WIDTH]).astype(np.float32)
HALVES, ALONE = [0, 2, 4], [0, 1, 2, 3, 4]


def stack(bounds=(0, 1, 2), **kwargs):
    return stack_of(blocks(bounds[-1]), bounds, **{"num_micro_batches": 4, **kwargs})


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "number", "options"),
    [
        (run_tf1, "layers:3", [0, 1, 3, 4], 4, {}),
        (run_eagerly, "layers:2", HALVES, 2, {"remat": "none"}),
        (run_tf1, "layers:1;data:2", [0, 4], 4, {"loop": True}),
        (run_tf2, "data:4;layers:2", HALVES, 1, {"remat": "none"}),
        (run_tf2, "layers:2;data:2", ALONE, 2, {"schedule": "looped_bfs:2"}),
    ],
)
def test_everything_equals_the_plain_model_with_dropout_on(run, mesh, bounds, number, options):
    params = stack(bounds, num_micro_batches=number, **options)
    found = equal_to_plain(run, params, [X], mesh, steps=3)
    assert len(found.grads) == 4
    # Layers count the whole batch.
    np.testing.assert_allclose(found.accumulators, [8.0] * 4)


def test_stages_beyond_the_devices_share_them(run):
    with pytest.warns(UserWarning, match="each place takes 2 in turn"):
        equal_to_plain(run, stack(ALONE, num_micro_batches=2), [X], 2, steps=3)


def test_seq_layer_equals_the_pipeline(run):
    equal_to_plain(run, stack_of(blocks(4), HALVES, SeqLayer), [X], 2, steps=3)


def test_batch_dim_1_and_layers_before(run):
    x = np.ascontiguousarray(X.swapaxes(0, 1))
    before = Block.Params().Set(name="before", time_major=True)
    sub = blocks(2, time_major=True)
    params = stack_of(sub, [0, 1, 2], num_micro_batches=4, batch_dim=1, before_tpl=[before])
    equal_to_plain(run, params, [x], 2, steps=3)


def test_none_keeps_its_place_and_integers_their_type(run):
    ids = np.arange(8, dtype=np.int32)
    result = equal_to_plain(run, stack(), [X, None, ids], 2, steps=1)
    assert len(result.outputs) == 2
    assert result.outputs[1].dtype == np.int32


class MapBlock(Block):
    """Takes and returns a NestedMap; turns the field `extra` on in the first layer only."""

    def FProp(self, theta, args):
        h = super().FProp(theta, args.x)
        return py_utils.NestedMap(x=h, extra=2.0 * h, nothing=None, ids=args.ids)


def test_nested_map_in_and_out(run):
    sub = [MapBlock.Params().Set(name=f"block{i}") for i in range(4)]
    argument = py_utils.NestedMap(x=X, ids=np.arange(8), nothing=None, extra=None)
    params = stack_of(sub, HALVES, num_micro_batches=4, nested_map_fprop=True)
    assert len(equal_to_plain(run, params, [argument], 2, steps=3).outputs) == 3


def test_fetched_activations_cross_stages_and_carry_gradients(run):
    sub = []
    for i, block in enumerate(blocks(2)):
        sub += [block, layers.FetchLayer.Params().Set(name=f"fetch{i}")]
    params = stack_of(sub, HALVES, num_micro_batches=4)
    params.cell_tpl[0].Set(act_fetch_layers=["fetch0"], num_act_outputs=1)
    params.cell_tpl[1].Set(act_fetch_layers=["fetch1"], num_act_inputs=1, num_act_outputs=2)
    whole = plain(sub, act_fetch_layers=["fetch0", "fetch1"], num_act_outputs=2)
    result = run(params, [X], steps=3, num_devices=2)
    assert len(result.outputs) == 3
    result.assert_close(run(whole, [X], steps=3), rtol=1e-4, atol=1e-5)


# Three rows are no multiple of the microbatches.
@pytest.mark.parametrize(("mesh", "rows"), [(1, 3), (2, 3), (2, 8), ("layers:2;data:2", 8)])
def test_evaluation_has_no_dropout_and_takes_any_batch(run, mesh, rows):
    found = equal_to_plain(run, stack(HALVES), [X[:rows]], mesh, do_eval=True, **EXACT)
    assert found.outputs[0].shape == (rows, 3, WIDTH)


class Shuffle(base_layer.BaseLayer):
    def FProp(self, theta, x):
        return tf.random.shuffle(x)


SHUFFLING = cells_of([Shuffle.Params().Set(name="s")], [0, 1])


@pytest.mark.parametrize(
    ("mesh", "kwargs", "rows", "message"),
    [
        (2, {"num_micro_batches": 3}, 8, "a batch of 8 does not divide into 3 microbatches"),
        (2, {"micro_batch_size": 3}, 8, r"size 3 \* num_micro_batches 4 is not the batch size 8"),
        (2, {}, None, "static shapes"),
        (1, {"cell_tpl": SHUFFLING}, 8, r"'s' calls 'random_shuffle'"),
        ("layers:2;data:4", {}, 8, r"8 does not divide into 4 microb.* of 4 replicas; .* 1, 2$"),
    ],
)
def test_what_cannot_be_cut_is_an_error_before_the_first_step(mesh, kwargs, rows, message):
    with executing(False, mesh):
        layer = stack(**kwargs).Instantiate()
        x = tf.compat.v1.placeholder(tf.float32, [rows, 3, WIDTH])
        with pytest.raises(PipelineError, match=message):
            layer.FPropDefaultTheta(x)


def test_dropout_without_a_global_step_is_an_error():
    with tf.Graph().as_default():
        layer = stack().Instantiate()
        with pytest.raises(PipelineError, match="keyed by the global step"):
            layer.FPropDefaultTheta(tf.constant(X))


class Table(Weighted):
    """Looks rows up, the same ones again and again."""

    def FProp(self, theta, ids):
        return tf.nn.embedding_lookup(theta.w, ids)


@pytest.mark.parametrize("pipelined", [True, False])
def test_gradients_are_dense_with_and_without_a_pipeline(pipelined):
    # Of rows that occur twice in a sparse one, lingvo's clipping would take the wrong norm.
    params = stack(cell_tpl=cells_of([Table.Params().Set(name="table")], [0, 1]))
    with executing(True):
        layer = params.Set(pipelined=pipelined, num_micro_batches=2).Instantiate()

        @tf.function(autograph=False)
        def gradient(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer.FPropDefaultTheta(ids))
            (grad,) = tape.gradient(loss, layer.vars.Flatten())
            assert isinstance(grad, tf.Tensor)
            return grad

        grad = gradient(tf.constant([[1, 1, 1, 3]] * 4))
    np.testing.assert_array_equal(grad[:, 0], [0, 12, 0, 4])


class ToyConv(base_layer.BaseLayer):
    """A 3 x 3 convolution with all weights 0.1 and a ReLU; counts its calls."""

    @classmethod
    def Params(cls):
        return super().Params().Set(name="toy")

    def __init__(self, params):
        super().__init__(params)
        conv = layers.Conv2DLayerNoPadding.Params().Set(
            filter_shape=(3, 3, 1, 1),
            filter_stride=(1, 1),
            params_init=py_utils.WeightInit.Constant(0.1),
        )
        self.CreateChild("conv", conv)
        self.RegisterAccumulator("calls", Counter())

    def FProp(self, theta, x):
        self.accumulators.calls.SetValue(self.accumulators.calls.GetValue() + 1.0)
        return tf.nn.relu(self.conv.FProp(theta.conv, x))

    @classmethod
    def FPropMeta(cls, p, x):
        return py_utils.NestedMap(flops=1, out_shapes=(x,))


def test_the_toy_cnn_has_the_gradient_norm_of_lingvos_own_test():
    convs = [ToyConv.Params().Set(name=f"layer{i}") for i in range(16)]
    cells = PartitionSequentialLayers(convs, 4, tshape.Shape([2, 8, 8, 1]))
    with executing(False):
        tf.compat.v1.set_random_seed(1245)
        x = tf.compat.v1.random_uniform([16, 8, 8, 1], seed=12345)
        layer = stack(cell_tpl=cells, num_micro_batches=8).Instantiate()
        logits = layer.FPropDefaultTheta(x)
        grads = tf.gradients(tf.reduce_mean(logits), tf.compat.v1.trainable_variables())
        norm = tf.sqrt(py_utils.SumSquared(grads))
        got, calls = evaluated([norm, layer.GetAccumulatorValues().Flatten()])
    assert got == pytest.approx(0.268087, abs=1e-6)
    assert calls == [8.0] * 16
