"""PipeliningLayer equals the plain stack and keeps what lingvo users rely on."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils, tshape

from pipemesh.errors import PipelineError
from pipemesh.layers import (
    FeatureExtractionLayer,
    PartitionSequentialLayers,
    PipeliningLayer,
    SeqLayer,
)
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline.stacks import plain

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 3, WIDTH]).astype(np.float32)


def cut(sub, num_stages):
    size = len(sub) // num_stages
    return [
        FeatureExtractionLayer.Params().Set(name=f"stage{i}", sub=sub[i * size : (i + 1) * size])
        for i in range(num_stages)
    ]


def pipelined(cells, num_micro_batches, **kwargs):
    return PipeliningLayer.Params().Set(
        name="stack", cell_tpl=cells, num_micro_batches=num_micro_batches, **kwargs
    )


@functools.cache
def expected(run):
    """The plain model's results, computed once for each mode."""
    return run(plain(blocks(4)), [X], steps=3)


OFTEN = [(run_tf1, 2, 4), (run_tf2, 4, 1), (run_tf2, 1, 8), (run_tf1, 4, 8)]


@pytest.mark.parametrize(
    ("run", "num_stages", "num_micro_batches"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.exhaustive)
        for case in itertools.product([run_tf1, run_tf2], [1, 2, 4], [1, 4, 8])
    ],
    indirect=["run"],
)
def test_everything_equals_the_plain_model_with_dropout_on(run, num_stages, num_micro_batches):
    params = pipelined(cut(blocks(4), num_stages), num_micro_batches)
    result = run(params, [X], steps=3, num_devices=num_stages)
    result.assert_close(expected(run), rtol=1e-4, atol=1e-5)
    assert len(result.grads) == 4
    assert result.accumulators == [8.0] * 4


def test_both_execution_modes_agree():
    params = pipelined(cut(blocks(4), 2), 2, remat="none")
    found = run_eagerly(params, [X], steps=3, num_devices=2)
    found.assert_close(expected(run_tf1), rtol=1e-4, atol=1e-5)


def test_stages_beyond_the_devices_share_them(run):
    params = pipelined(cut(blocks(4), 4), 2)
    with pytest.warns(UserWarning, match="each place takes 2 in turn"):
        found = run(params, [X], steps=3, num_devices=2)
    found.assert_close(expected(run), rtol=1e-4, atol=1e-5)


def test_seq_layer_equals_the_pipeline(run):
    params = SeqLayer.Params().Set(name="seq", cell_tpl=cut(blocks(4), 2))
    run(params, [X], steps=3, num_devices=2).assert_close(expected(run), rtol=1e-4, atol=1e-5)


def test_dropout_differs_from_step_to_step(run):
    params = pipelined(cut(blocks(2), 2), 4)
    steps = [run(params, [X], steps=n, num_devices=2).weights for n in (0, 1, 2)]
    moves = [[b[k] - a[k] for k in a] for a, b in itertools.pairwise(steps)]
    assert all(np.abs(np.asarray(m)).max() > 0 for m in moves)


def test_batch_dim_1_and_layers_before(run):
    x = np.ascontiguousarray(X.swapaxes(0, 1))
    before = Block.Params().Set(name="before", time_major=True)
    wanted = run(plain([before.Copy(), *blocks(2, time_major=True)]), [x], steps=3)
    cells = cut(blocks(2, time_major=True), 2)
    found = run(pipelined(cells, 4, batch_dim=1, before_tpl=[before]), [x], steps=3, num_devices=2)
    found.assert_close(wanted, rtol=1e-4, atol=1e-5)


def test_one_output_is_bare_and_several_are_a_tuple():
    with tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        one = pipelined(cut(blocks(2), 2), 2).Instantiate().FPropDefaultTheta(tf.constant(X))
        assert isinstance(one, tf.Tensor)
    with tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        stack = pipelined(cut(blocks(2), 2), 2).Instantiate()
        several = stack.FPropDefaultTheta(tf.constant(X), None, tf.zeros([8]))
        assert isinstance(several, tuple) and several[1] is None
        assert [t.shape.as_list() for t in several[::2]] == [[8, 3, WIDTH], [8]]


def test_none_keeps_its_place_and_integers_their_type(run):
    ids = np.arange(8, dtype=np.int32)
    result = run(pipelined(cut(blocks(2), 2), 4), [X, None, ids], steps=1, num_devices=2)
    assert len(result.outputs) == 2
    np.testing.assert_array_equal(result.outputs[1], ids)
    assert result.outputs[1].dtype == np.int32
    result.assert_close(run(plain(blocks(2)), [X, None, ids], steps=1), rtol=1e-4, atol=1e-5)


class MapBlock(Block):
    """Takes and returns a NestedMap; turns the field `extra` on in the first layer only."""

    def FProp(self, theta, args):
        h = super().FProp(theta, args.x)
        return py_utils.NestedMap(x=h, extra=2.0 * h, nothing=None, ids=args.ids)


def test_nested_map_in_and_out(run):
    sub = [MapBlock.Params().Set(name=f"block{i}") for i in range(4)]
    argument = py_utils.NestedMap(x=X, ids=np.arange(8), nothing=None, extra=None)
    params = pipelined(cut(sub, 2), 4, nested_map_fprop=True)
    result = run(params, [argument], steps=3, num_devices=2)
    expected = run(plain(sub), [argument], steps=3)
    result.assert_close(expected, rtol=1e-4, atol=1e-5)
    assert len(result.outputs) == 3


def test_fetched_activations_cross_stages_and_carry_gradients(run):
    def sub(i):
        return [*blocks(4)[i : i + 1], layers.FetchLayer.Params().Set(name=f"fetch{i}")]

    whole = plain(sub(0) + sub(1), act_fetch_layers=["fetch0", "fetch1"], num_act_outputs=2)
    cells = [
        FeatureExtractionLayer.Params().Set(
            name="a", sub=sub(0), act_fetch_layers=["fetch0"], num_act_outputs=1
        ),
        FeatureExtractionLayer.Params().Set(
            name="b",
            sub=sub(1),
            act_fetch_layers=["fetch1"],
            num_act_inputs=1,
            num_act_outputs=2,
        ),
    ]
    expected = run(whole, [X], steps=3)
    result = run(pipelined(cells, 4), [X], steps=3, num_devices=2)
    assert len(result.outputs) == 3
    result.assert_close(expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_eval_mode_has_no_dropout_on_one_device_and_on_several(run, num_devices):
    expected = run(plain(blocks(4)), [X], do_eval=True)
    params = pipelined(cut(blocks(4), 2), 4)
    result = run(params, [X], num_devices=num_devices, do_eval=True)
    result.assert_close(expected)
    without = run(plain(blocks(4, rate=0.0)), [X], do_eval=True)
    result.assert_close(without)


def test_eval_on_one_device_takes_any_batch(run):
    params = pipelined(cut(blocks(4), 2), 4)
    assert run(params, [X[:3]], do_eval=True).outputs[0].shape == (3, 3, WIDTH)


@pytest.mark.slow
def test_automatic_stages_have_the_same_names_and_gradients(run):
    shape = tshape.Shape(list(X.shape))
    results = [
        run(
            pipelined(PartitionSequentialLayers(blocks(4), n, shape), 4),
            [X],
            steps=3,
            num_devices=n,
        )
        for n in (1, 3)
    ]
    for result in results[1:]:
        result.assert_close(results[0], rtol=1e-4, atol=1e-5)


class _SquareError(Block):
    """The last layer of a stack: gives every example's loss."""

    def FProp(self, theta, x, labels):
        return tf.reduce_sum(tf.square(super().FProp(theta, x) - labels), axis=[1, 2])


def test_a_loss_of_one_number_an_example_can_be_the_output(run):
    sub = [*blocks(3), _SquareError.Params().Set(name="loss")]

    def total(outputs):
        return tf.reduce_mean(outputs)

    expected = run(plain(sub), [X, X], steps=3, loss=total)
    result = run(pipelined(cut(sub, 2), 4), [X, X], steps=3, num_devices=2, loss=total)
    assert result.outputs[0].shape == (8,)
    result.assert_close(expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "x", "message"),
    [
        ({"num_micro_batches": 3}, X, "a batch of 8 does not divide into 3 microbatches"),
        ({"num_micro_batches": 16}, X, "a batch of 8 does not divide into 16"),
        (
            {"num_micro_batches": 2, "micro_batch_size": 3},
            X,
            r"micro_batch_size 3 \* num_micro_batches 2 is not the batch size 8",
        ),
    ],
)
def test_bad_params_are_errors_before_the_first_step(run, kwargs, x, message):
    params = pipelined(cut(blocks(2), 2), 1).Set(**kwargs)
    with pytest.raises(PipelineError, match=message):
        run(params, [x])


def test_dynamic_shapes_are_an_error_that_says_what_to_do():
    with tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        stack = pipelined(cut(blocks(2), 2), 2).Instantiate()
        x = tf.compat.v1.placeholder(tf.float32, [None, 3, WIDTH])
        with pytest.raises(PipelineError, match="static shapes"):
            stack.FPropDefaultTheta(x)


def test_dropout_without_a_global_step_is_an_error():
    with tf.Graph().as_default():
        stack = pipelined(cut(blocks(2), 2), 2).Instantiate()
        with pytest.raises(PipelineError, match="keyed by the global step"):
            stack.FPropDefaultTheta(tf.constant(X))


class _Shuffle(base_layer.BaseLayer):
    def FProp(self, theta, x):
        return tf.random.shuffle(x)


def test_random_operations_that_cannot_be_cut_are_errors():
    stage = FeatureExtractionLayer.Params().Set(name="a", sub=[_Shuffle.Params().Set(name="s")])
    with tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        with pytest.raises(PipelineError, match=r"'s' calls 'random_shuffle'"):
            pipelined([stage], 2).Instantiate().FPropDefaultTheta(tf.constant(X))


class _ToyConv(base_layer.BaseLayer):
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
        self.RegisterAccumulator("calls", _Calls())

    def FProp(self, theta, x):
        self.accumulators.calls.SetValue(self.accumulators.calls.GetValue() + 1.0)
        return tf.nn.relu(self.conv.FProp(theta.conv, x))

    @classmethod
    def FPropMeta(cls, p, x):
        return py_utils.NestedMap(flops=1, out_shapes=(x,))


class _Calls(base_layer.Accumulator):
    def DefaultValue(self):
        return tf.constant(0.0)


@pytest.mark.parametrize(("num_stages", "automatic"), [(2, False), (4, True)])
def test_the_toy_cnn_has_the_gradient_norm_of_lingvos_own_test(num_stages, automatic):
    convs = [_ToyConv.Params().Set(name=f"layer{i}") for i in range(16)]
    if automatic:
        cells = PartitionSequentialLayers(convs, num_stages, tshape.Shape([2, 8, 8, 1]))
    else:
        cells = cut(convs, num_stages)
        # The stages pass on what a fetch layer in the first of them has seen.
        cells[0].sub.append(layers.FetchLayer.Params().Set(name="fetch"))
        cells[0].act_fetch_layers = ["fetch"]
        for cell in cells:
            cell.num_act_inputs = int(cell is not cells[0])
            cell.num_act_outputs = 1
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(1245)
        x = tf.compat.v1.random_uniform([16, 8, 8, 1], seed=12345)
        stack = pipelined(cells, 8).Instantiate()
        outputs = stack.FPropDefaultTheta(x)
        logits = outputs if automatic else outputs[0]
        grads = tf.gradients(tf.reduce_mean(logits), tf.compat.v1.trainable_variables())
        norm = tf.sqrt(py_utils.SumSquared(grads))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            got, calls = session.run([norm, stack.GetAccumulatorValues().Flatten()])
            fetched = None if automatic else session.run(outputs[1])
    assert got == pytest.approx(0.268087, abs=1e-6)
    assert calls == [8.0] * 16
    assert automatic or fetched.shape == (16, 8, 8, 1)
