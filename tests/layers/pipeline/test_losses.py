"""Losses inside a pipeline."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.pipeline.losses import check_head
from tests.layers.blocks import Weighted
from tests.layers.harness import run_eagerly, run_tf1, run_tf2
from tests.layers.stacks import cells_of, first, stack_of

pytestmark = pytest.mark.gpu

X = np.random.default_rng(0).normal(size=[8, 3, 4]).astype(np.float32)
MODES = {"tf1": run_tf1, "function": run_tf2, "eager": run_eagerly}
KINDS = {
    "mean": lambda y, batch_dim: tf.reduce_mean(y**2),
    "sum": lambda y, batch_dim: tf.reduce_sum(y**3),
    "rows": lambda y, batch_dim: tf.reduce_sum(y**2, [2]),
    "scalars": lambda y, batch_dim: tf.reduce_sum(y**2, [0, 1]),
}


class Dense(Weighted):
    """Adds a loss of its activations; as a head it also returns their sum and their number."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("kind", None, "One of KINDS.")
        p.Define("head", False, "Whether it returns a loss that has the other losses in it.")
        p.Define("batch_dim", 0, "The batch's.")
        return p

    def FProp(self, theta, x):
        p = self.params
        y = tf.tanh(tf.tensordot(x, theta.w, 1))
        context = py_utils.AuxLossContext.Current()
        if context is not None and p.kind:
            context.AddLoss(KINDS[p.kind](y, p.batch_dim))
        if not p.head:
            return y
        loss = tf.reduce_sum(y**2)
        if context is not None:
            loss += tf.add_n(list(map(tf.reduce_sum, context.aux_losses)))
        return loss, tf.cast(tf.shape(y)[p.batch_dim], tf.float32)


class Whole(base_layer.BaseLayer):
    """A stack in an `AuxLossContext`, behind a layer that adds to it as well."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("stack", None, "The stack.")
        p.Define("inside", True, "Whether there is a context.")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("stack", self.params.stack)

    def FProp(self, theta, x):
        if not self.params.inside:
            return self.stack.FProp(theta.stack, x)
        with py_utils.AuxLossContext() as context:
            y = self.stack.FProp(theta.stack, x)
            return (*y, *context.aux_losses) if isinstance(y, tuple) else (y, *context.aux_losses)


def model(kind, *, head=False, inside=True, **kwargs):
    dim = kwargs.get("batch_dim", 0)
    layers = [Dense.Params().Set(name=f"dense{i}", kind=kind, batch_dim=dim) for i in range(4)]
    # A stage without a loss, one with two; the last one is the head.
    layers[1].kind = None
    layers[3].head = head
    before = [Dense.Params().Set(name="before", kind=kind, batch_dim=dim)]
    kwargs = {"num_micro_batches": 4, "before_tpl": before, "loss_inside": head, **kwargs}
    stack = stack_of([layers[i] for i in (1, 0, 2, 3)], [0, 1, 3, 4], **kwargs)
    return Whole.Params().Set(name="whole", stack=stack, inside=inside)


@pytest.mark.parametrize(
    ("mode", "kind", "devices", "kwargs"),
    [
        ("tf1", "mean", 3, {}),
        ("eager", "rows", 3, {"batch_dim": 1, "num_micro_batches": 3}),
        ("function", "mean", "layers:3;data:2", {"remat": "none", "loop": True}),
        ("eager", "mean", 3, {"num_micro_batches": 1}),
    ],
)
def test_aux_losses_equal_those_of_the_plain_stack(mode, kind, devices, kwargs):
    accumulation = None if kind == "rows" or kwargs.get("num_micro_batches") == 1 else kind
    run = MODES[mode]
    wanted = run(model(kind, pipelined=False, **kwargs), [X], num_devices=devices)
    assert len(wanted.outputs) == 5, "the outputs, and four losses"
    params = model(kind, aux_loss_microbatch_accumulation=accumulation, **kwargs)
    run(params, [X], num_devices=devices).assert_close(wanted)


@pytest.mark.parametrize(
    ("mode", "schedule", "kind"),
    [
        ("tf1", "zb_h1", "sum"),
        ("function", "1f1b", "rows"),
        ("eager", "gpipe", "mean"),
    ],
)
def test_a_head_adds_the_losses_of_all_layers_before(mode, schedule, kind):
    """A mean was counted once for each microbatch."""
    kwargs = {"aux_loss_microbatch_accumulation": kind if kind != "rows" else None, "head": True}
    wanted = model(kind, pipelined=False, **kwargs)
    params = model(kind, schedule=schedule, **kwargs)
    for p in (wanted, params):
        # Of a loss before the stages none of them knows: it is refused.
        p.stack.before_tpl[0].kind = None
    run = MODES[mode]
    wanted = run(wanted, [X], num_devices=3, loss=first)
    run(params, [X], num_devices=3, loss=first).assert_close(wanted)


def test_what_cannot_be_carried_is_refused_by_name(run):
    simd = model("sum", lowering="simd")
    simd.stack.cell_tpl = cells_of(simd.stack.before_tpl * 3, [0, 1, 2, 3])
    inside = {"head": True, "aux_loss_microbatch_accumulation": "sum"}
    for params, message in (
        (model("mean"), "stage 's1': a layer adds a scalar .* 4 parts .*'mean' if"),
        (model("scalars"), r"stage 's2': .* of shape \(4,\) to .* each of the 2 examples"),
        (model("mean", aux_loss_microbatch_accumulation="max"), "accumulation is 'max'"),
        (simd, "stage 's0': a layer adds to AuxLossContext, but with lowering='simd' stages"),
    ):
        with pytest.raises(PipelineError, match=message):
            run(params, [X], num_devices=3)
    with pytest.raises(PipelineError, match="1 losses were added to AuxLossContext before the"):
        run(model("sum", **inside), [X], num_devices=3)
    alone = model("sum", **inside)
    alone.stack.before_tpl[0].kind = None
    with pytest.raises(PipelineError, match=r"with loss_inside a loss .* has no gradient outside"):
        run(alone, [X], num_devices=3, loss=lambda y: y[0] + y[-1])


def test_without_a_context_nothing_is_added_nor_refused(run):
    wanted = run(model(None), [X], num_devices=3)
    found = run(model("mean", inside=False), [X], num_devices=3)
    found.assert_close(wanted)


def check(function, loss_inside=True, names=("outputs.0", "outputs.1", "outputs.2", "outputs.3")):
    """Checks what a function of a vector returns, in a graph, where heads are traced."""
    with tf.Graph().as_default():
        outputs = [tf.convert_to_tensor(t) for t in function(tf.ones([4]))]
        check_head("the head", names[: len(outputs)], outputs, loss_inside)


def summed(x):
    return tf.reduce_sum(x)


def test_a_summed_loss_with_its_weight_is_right():
    check(lambda x: (x, tf.ones([1])), loss_inside=False)
    for function in (
        lambda x: (summed(x), 4.0),
        lambda x: (summed(x), 4),
        lambda x: (summed(x), summed(tf.abs(x)), x, summed(x)),
        lambda x: (tf.cast(summed(x), tf.float16), 4),
        # A mean whose weight is one, and one of a single element.
        lambda x: (tf.reduce_mean(x), 1.0),
        lambda x: (tf.reduce_mean(x), 1),
        lambda x: (tf.reduce_mean(x[:1]), 4.0),
        # Divided by something else than the weight.
        lambda x: (summed(x) / summed(x * x), summed(tf.abs(x))),
    ):
        check(function)


def _divided(x, divide, disguise):
    weight = summed(tf.abs(x))
    return disguise(divide(summed(x), disguise(weight))), weight


def test_anything_else_is_an_error_that_says_what_to_return():
    for function, message in (
        (lambda x: (summed(x),), "outputs.0: float32 of shape .*, and no weight after it"),
        (lambda x: (x, 4.0), "outputs.0 is no loss"),
        (lambda x: (tf.size(x), 4.0), "outputs.0 is no loss"),
        (lambda x: (summed(x), x), "outputs.1 is no weight"),
        (lambda x: (summed(x), True), "outputs.1 is no weight"),
        (lambda x: (tf.reduce_mean(x), 4.0), r"the loss \(outputs.0\) is a mean, Mean"),
        (lambda x: (tf.cast(tf.reduce_mean(x), tf.float64), 4.0), "is a mean, Mean"),
        (lambda x: _divided(x, tf.divide, tf.identity), "is a mean, RealDiv"),
        (
            lambda x: _divided(x, tf.math.divide_no_nan, lambda t: tf.ensure_shape(t, [])),
            "is a mean, DivNoNan",
        ),
    ):
        with pytest.raises(PipelineError, match=rf"^the head.*{message}.*return tf\.reduce_sum"):
            check(function)
    with pytest.raises(PipelineError, match="and no weight after it"):
        check(lambda x: (summed(x), 4.0), names=["outputs.0.loss", "outputs.0.weight"])
    with pytest.raises(PipelineError, match=r"^the head returns a scalar \(outputs\.1\)"):
        check(lambda x: (x, summed(x)), loss_inside=False)
