"""Two calls in a step, two stacks of one model, recomputation, lingvo's own stack: whose masks."""

import functools
import importlib.util

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, gpipe, layers, py_utils

import pipemesh.layers
from pipemesh.errors import PipelineError
from pipemesh.layers import FeatureExtractionLayer, FunctionLayer, PipeliningLayer, SeqLayer
from pipemesh.layers.step_seed import whole_batch_randomness
from tests.layers.harness import (
    cluster,
    evaluated,
    executing,
    initial_value,
    run_eagerly,
    run_tf1,
    run_tf2,
)

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


@pytest.mark.parametrize("run", [run_tf1, run_tf2, run_eagerly])
@pytest.mark.parametrize("kind", [SeqLayer, PipeliningLayer])
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


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_stage_may_contain_what_lingvo_rematerializes(num_micro_batches):
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

    pipeline = PipeliningLayer.Params().Set(name="stack", num_micro_batches=num_micro_batches)
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


# lingvo's GPipeTransformerStack with this pipeline below it.

SOURCE, TARGET, BATCH, WIDTH, VOCAB = 3, 4, 8, 4, 7


@pytest.fixture(scope="module")
def transformer_stack():
    """The class, from a copy of lingvo's module that imports the pipeline from here."""
    names = ("FeatureExtractionLayer", "PipeliningLayer")
    saved = {name: getattr(gpipe, name) for name in names}
    found = importlib.util.find_spec("lingvo.core.layers_with_gpipe")
    module = importlib.util.module_from_spec(found)
    try:
        for name in names:
            setattr(gpipe, name, getattr(pipemesh.layers, name))
        found.loader.exec_module(module)
    finally:
        for name, value in saved.items():
            setattr(gpipe, name, value)
    return module.GPipeTransformerStack


def transformer(stack, num_micro_batches):
    p = stack.Params().Set(
        name="stack",
        model_dim=WIDTH,
        num_encoder_layers=1,
        num_decoder_layers=1,
        splits=2,
        num_micro_batches=num_micro_batches,
    )
    p.emb_tpl.token_emb.Set(vocab_size=VOCAB, embedding_dim=WIDTH)
    p.emb_tpl.position_emb.embedding_dim = WIDTH
    p.emb_tpl.input_dropout_prob = 0.3
    p.softmax_tpl.Set(num_classes=VOCAB, input_dim=WIDTH)
    for tpl in (p.encoder_tpl, p.decoder_tpl):
        tpl.source_dim = WIDTH
        tpl.tr_atten_tpl.Set(
            num_attention_heads=2, residual_dropout_prob=0.3, atten_dropout_prob=0.3
        )
        tpl.tr_fflayer_tpl.Set(hidden_dim=6, residual_dropout_prob=0.3, relu_dropout_prob=0.3)
    return p


@pytest.mark.slow
def test_lingvos_transformer_stack_does_not_depend_on_the_number_of_microbatches(
    transformer_stack,
):
    rng = np.random.default_rng(0)
    source, target = (rng.integers(0, VOCAB, [t, BATCH]) for t in (SOURCE, TARGET))
    padding = [np.zeros([t, BATCH], np.float32) for t in (SOURCE, TARGET)]

    def run(num_micro_batches):
        with tf.Graph().as_default(), cluster(2):
            py_utils.GetOrCreateGlobalStepVar()
            layer = transformer(transformer_stack, num_micro_batches).Instantiate()
            losses, logits = layer.FPropDefaultTheta(
                tf.constant(source, tf.int32),
                tf.constant(padding[0]),
                tf.constant(target, tf.int32),
                tf.constant(padding[1]),
                labels=tf.constant(target, tf.int32),
                label_weights=tf.constant(1 - padding[1]),
            )
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for variable in layer.vars.Flatten():
                    variable.load(initial_value(variable), session)
                return session.run([losses, logits])

    want, got = run(1), run(4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
