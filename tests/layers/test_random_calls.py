"""Two calls in a step, two stacks of one model, recomputation: whose masks."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers import FeatureExtractionLayer, FunctionLayer, PipeliningLayer, SeqLayer
from pipemesh.layers.step_seed import whole_batch_randomness
from tests.layers.harness import evaluated, executing, run_eagerly, run_tf1, run_tf2
from tests.pairwise import in_turn

ONES = np.ones([8, 32], np.float32)


def dropout_stage(name):
    dropout = layers.DropoutLayer.Params().Set(name="dropout", keep_prob=0.5)
    return FeatureExtractionLayer.Params().Set(name=name, sub=[dropout])


class TwoStacks(base_layer.BaseLayer):
    """Calls one stack twice and, once, another one whose layers have the same names."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("stack", None, "Params of both stacks.")
        return p

    def __init__(self, params):
        super().__init__(params)
        for name in ("first", "second"):
            self.CreateChild(name, self.params.stack.Copy().Set(name=name))

    def FProp(self, theta, x):
        once, again = (self.first.FProp(theta.first, x) for _ in range(2))
        return once, again, self.second.FProp(theta.second, x)


def two_stacks(kind, **kwargs):
    cells = [dropout_stage("a"), dropout_stage("b")]
    stack = kind.Params().Set(cell_tpl=cells, **kwargs)
    return TwoStacks.Params().Set(name="two", stack=stack)


@pytest.fixture(scope="module")
def masks():
    return run_tf1(two_stacks(SeqLayer), [ONES], num_devices=2, loss=None).outputs


def test_two_calls_in_a_step_and_two_stacks_have_masks_of_their_own(masks):
    assert len({mask.tobytes() for mask in masks}) == 3
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = np.mean((masks[one] > 0) & (masks[other] > 0))
        assert both < 0.15, "two independent masks that keep a quarter have a sixteenth in common"


@pytest.mark.parametrize(
    ("kind", "run"), in_turn([PipeliningLayer, SeqLayer], [run_tf1, run_tf2, run_eagerly])
)
def test_calls_are_counted_alike_with_and_without_a_pipeline(run, kind, masks):
    cut = {"num_micro_batches": 4} if kind is PipeliningLayer else {}
    result = run(two_stacks(kind, **cut), [ONES], num_devices=2, loss=None)
    for got, want in zip(result.outputs, masks, strict=True):
        np.testing.assert_array_equal(got, want)


def seq_layer():
    return SeqLayer.Params().Set(name="seq", cell_tpl=[dropout_stage("a")]).Instantiate()


def test_what_lingvo_rematerializes_draws_the_same_again():
    with executing(False):
        seq, x = seq_layer(), tf.constant(ONES)
        ys = [py_utils.RematerializeFn(seq.FPropDefaultTheta, x) for _ in range(2)]
        ys, grads = evaluated([ys, [tf.gradients(y, x)[0] for y in ys]])
    for y, grad in zip(ys, grads, strict=True):
        np.testing.assert_array_equal(y, grad)
    assert (ys[0] != ys[1]).any()


def test_what_tensorflow_recomputes_is_an_error():
    with executing(False):
        seq, x = seq_layer(), tf.constant(ONES)
        with pytest.raises(PipelineError, match=r"recompute_grad calls 'seq' again"):
            tf.gradients(tf.recompute_grad(seq.FPropDefaultTheta)(x), x)


def dropped(x):
    return tf.nn.dropout(tf.tanh(x), 0.5)


def test_a_stage_may_contain_what_lingvo_rematerializes():
    def gradient(stack, function):
        stack.cell_tpl = [
            FeatureExtractionLayer.Params().Set(
                name=name, sub=[FunctionLayer.Params().Set(name=f"d{name}", function=function)]
            )
            for name in "ab"
        ]
        with executing(False):
            x = tf.constant(ONES)
            return evaluated(tf.gradients(stack.Instantiate().FPropDefaultTheta(x), x)[0])

    pipeline = PipeliningLayer.Params().Set(name="stack", num_micro_batches=4)
    got = gradient(pipeline, functools.partial(py_utils.RematerializeFn, dropped))
    plain = gradient(SeqLayer.Params().Set(name="stack"), dropped)
    np.testing.assert_allclose(got, plain, rtol=1e-6)


def test_randomness_without_a_layer_counts_nothing():
    drawn = []
    with executing(False):
        for _ in range(2):
            with whole_batch_randomness():
                drawn.append(tf.random.uniform([4]))
        np.testing.assert_array_equal(*evaluated(drawn))
