"""A learner that would treat slices otherwise than whole weights is an error."""

import re

import pytest
import tensorflow as tf
from lingvo.core import base_layer, learner, optimizer, py_utils

from pipemesh.backend.saved_state import Slice, mark_slice, slice_of
from pipemesh.errors import PipelineError
from pipemesh.layers.named import FeedForward, lowering_scope
from pipemesh.layers.optimizers import Adafactor, check_learner
from pipemesh.layers.optimizers.right_on_slices import ELEMENTWISE
from tests.layers.harness import cluster
from tests.layers.named.harness import make_lowering

SGD, SHAMPOO = optimizer.SGD.Params(), optimizer.DistributedShampoo.Params()


class Mine(optimizer.Adam):
    """Perhaps elementwise, perhaps not."""


class Elementwise(optimizer.Adam):
    right_on_slices = True


def composite(pattern, chosen=SGD):
    chosen = {pattern: (chosen, 0.1), "default_optimizer": (SGD, 0.1)}
    return optimizer.CompositeOptimizer.Params().Set(optimizer_map=chosen)


def slices():
    found = []
    for number in range(2):
        variable = tf.Variable([1.0, 2.0], name=f"layer/w_slice_{number}/var")
        mark_slice(variable, "layer/w/var", Slice((4,), (2 * number,)))
        found.append(variable)
    return found


@pytest.mark.parametrize(
    "options",
    [
        *({"optimizer": kind.Params()} for kind in (*ELEMENTWISE, Adafactor, Elementwise)),
        {"optimizer": optimizer.Accumulator.Params().Set(optimizer_tpl=SGD)},
        {"optimizer": composite(r"layer/w(_slice_\d+)?/var", Adafactor.Params())},
        {"clip_gradient_norm_to_value": 1.0, "skip_zero_gradients": "weight"},
        {"bprop_variable_filter": "layer", "bprop_variable_exclusion": "other"},
    ],
)
def test_what_is_right_on_slices_passes(options):
    check_learner(learner.Learner.Params().Set(name="loss", **options), slices())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": SHAMPOO}, "optimizer DistributedShampoo .* use SGD, Momentum, .*Adafactor"),
        ({"optimizer": optimizer.AdaGraft.Params()}, "optimizer AdaGraft would take each"),
        (
            {"optimizer": optimizer.XLAShardingAdafactor.Params()},
            "use pipemesh.layers.optimizers.Adafactor, whose params are the same, or a layout",
        ),
        (
            {"optimizer": optimizer.XLAShardingAdafactorAccuGrad.Params()},
            "use pipemesh.layers.optimizers.Adafactor",
        ),
        ({"optimizer": Mine.Params()}, "optimizer Mine .* right_on_slices = True"),
        (
            {"optimizer": optimizer.Accumulator.Params().Set(optimizer_tpl=SHAMPOO)},
            "DistributedShampoo",
        ),
        ({"optimizer": composite("layer.*", SHAMPOO)}, "DistributedShampoo"),
        (
            {"optimizer": composite("layer/w/var")},
            "optimizer_map 'layer/w/var' finds 'layer/w/var:0' and not 'layer/w_slice_0/var:0'",
        ),
        (
            {"bprop_variable_filter": "_0/var"},
            "bprop_variable_filter '_0/var' finds 'layer/w_slice_0/var:0' and not 'layer/w/var:0'",
        ),
        ({"bprop_variable_exclusion": "/w/"}, "bprop_variable_exclusion '/w/' finds"),
        ({"clip_gradient_single_norm_to_value": 1.0}, "use clip_gradient_norm_to_value, or"),
        ({"skip_zero_gradients": "variable"}, "use 'weight' or None, or a layout"),
        ({"gradient_combiner": base_layer.BaseLayer.Params()}, "gradient_combiner BaseLayer is"),
    ],
)
def test_what_is_not_is_an_error_that_says_what_to_change(options, told):
    p = learner.Learner.Params().Set(name="loss", **options)
    with pytest.raises(PipelineError, match=told) as caught:
        check_learner(p, slices())
    assert "learner 'loss' is given slices of weights, such as 'layer/w_slice_0/var:0'" in str(
        caught.value
    )
    check_learner(p, [tf.Variable([1.0])])


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("mesh", "refused"), [("model:2", True), ("model:1", False)])
def test_learners_check_when_a_step_is_built(eager, mesh, refused):
    py_utils.SetEagerMode(eager, test_mode=True)
    lowering = make_lowering(mesh)
    try:
        with cluster(1), lowering_scope(lowering), tf.Graph().as_default():
            py_utils.GetOrCreateGlobalStepVar()
            layer = FeedForward.Params().Set(name="ff", input_dim=4, hidden_dim=8).Instantiate()
            p = learner.Learner.Params().Set(name="loss", optimizer=Mine.Params())
            learned = p.Instantiate()
            y = tf.add_n([tf.reduce_sum(v) for v in layer.vars.Flatten()])
            names = [n for v in layer.vars.Flatten() if (n := slice_of(v))]
            assert bool(names) == refused
            if refused:
                with pytest.raises(PipelineError, match=re.escape("optimizer Mine would take")):
                    learned.Apply({"loss": (y, 1.0)}, layer.vars)
            elif not eager:
                learned.Apply({"loss": (y, tf.constant(1.0))}, layer.vars)
    finally:
        py_utils.SetEagerMode(False, test_mode=True)
