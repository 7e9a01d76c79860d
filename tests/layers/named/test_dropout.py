"""Dropout by named layers."""

import numpy as np
import pytest
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers import FeatureExtractionLayer
from pipemesh.layers.named import Dropout
from tests.layers.harness import cluster
from tests.layers.named.harness import MESHES, run

X = np.ones([4, 3, 8], np.float32)
PARAMS = Dropout.Params().Set(name="dropout", rate=0.5)
RULES = "batch:data;embed:model"


def call(layer, theta, x):
    return layer.FProp(theta, layer.Named(x, "batch;length;embed"))


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_the_mask_is_the_same_under_every_layout(mesh):
    whole = run(PARAMS, [X], call=call)
    assert set(np.unique(whole.outputs[0])) == {0.0, 2.0}
    run(PARAMS, [X], mesh, RULES, call=call).assert_close(whole.outputs, {})


def test_masks_differ_by_step_by_layer_and_by_call():
    first = run(PARAMS, [X], call=call).outputs[0]
    same = run(PARAMS, [X], call=call).outputs[0]
    step = run(PARAMS, [X], call=call, step=4).outputs[0]
    layer = run(PARAMS.Copy().Set(name="other"), [X], call=call).outputs[0]

    def twice(layer, theta, x):
        return call(layer, theta, x), call(layer, theta, x)

    one, two = run(PARAMS, [X], call=twice).outputs
    assert (first == same).all() and (first == one).all()
    assert (first != step).any() and (first != layer).any() and (one != two).any()


def test_nothing_is_dropped_in_evaluation():
    def in_evaluation(layer, theta, x):
        with cluster(1, do_eval=True):
            return call(layer.params.Copy().Instantiate(), theta, x)

    assert (run(PARAMS, [X], call=in_evaluation).outputs[0] == 1).all()


@pytest.mark.parametrize("rate", [1.0, -0.1, "half"])
def test_a_rate_that_is_no_probability_is_an_error(rate):
    with pytest.raises(PipelineError, match=r"rate is .* below 1"):
        PARAMS.Copy().Set(rate=rate).Instantiate()


def test_in_a_stack_masks_go_by_the_names_of_its_layers():
    class Both(Dropout):
        def FProp(self, theta, x):
            return super().FProp(theta, self.Named(x, "batch;length;embed"))

    def stack(*names):
        subs = [Both.Params().Set(name=name, rate=0.5) for name in names]
        params = FeatureExtractionLayer.Params().Set(name="stage", sub=subs)
        return run(params, [X], "data:2;model:2", RULES).outputs[0]

    assert (stack("a") == stack("a")).all()
    assert (stack("a") != stack("b")).any()
    # Not the same numbers twice.
    assert py_utils.NestedMap(left=(stack("a", "b") != 0).mean()).left < 0.4
