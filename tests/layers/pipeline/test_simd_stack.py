"""Stacks of layers with named dims and their loss as one program train as the plain stack does."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import BatchNorm
from pipemesh.recurrent import ActionClock
from tests.layers.harness import cluster, executing, run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline.named_stacks import INPUTS, TIED, Masked, language, language_layers
from tests.layers.stacks import equal_to_plain, first

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


class PlainHead(base_layer.BaseLayer):
    """A layer of lingvo, for which the devices' slices are joined."""

    def FProp(self, theta, x, labels, weights, nothing):
        squares = tf.reduce_sum(tf.square(x), -1) * weights
        return tf.reduce_sum(squares), tf.size(labels), squares


SPLIT = "layers:2;data:2;model:2 vocab:model;d_ff:model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "steps", "options"),
    [
        (run_tf1, "layers:2", [0, 2, 4], 3, {}),
        # The second step calls the same function with other weights.
        (run_eagerly, "layers:2;model:2 vocab:model", [0, 2, 4], 2, {}),
        (run_tf2, SPLIT, [0, 2, 4], 3, {"tied": TIED}),
        (run_tf2, "layers:2", [0, 2, 3, 4, 6], 3, {"schedule": "looped_bfs:2"}),
    ],
)
def test_everything_equals_the_plain_stack_with_dropout_on(run, mesh, bounds, steps, options):
    params = language(bounds, **options)
    equal_to_plain(run, params, INPUTS, mesh, steps=steps, loss=first, **CLOSE)


def test_evaluation_has_no_dropout_and_no_gradient():
    options = {"do_eval": True, "loss": None}
    equal_to_plain(run_tf2, language([0, 2, 4]), INPUTS, "layers:2;data:2", **options, **CLOSE)


def test_the_head_may_be_a_layer_of_lingvo():
    layers = [*language_layers(2)[:-1], PlainHead.Params().Set(name="named_head")]
    params, mesh = language([0, 2, 4], layers=layers), "layers:2;model:2 d_ff:model"
    with pytest.warns(UserWarning, match="'s1_behind' has no layer with named dims"):
        equal_to_plain(run_tf2, params, INPUTS, mesh, loss=first, **CLOSE)


@pytest.mark.slow
def test_layers_compute_in_bfloat16_as_a_placement_does():
    params = language([0, 2, 4], fprop_dtype=tf.bfloat16)
    found, wanted = (
        run_tf2(params.Copy().Set(lowering=lowering), INPUTS, loss=first, num_devices=2)
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
        layer = language([0, 3, 6]).Instantiate()
        lies = {v.name.split("/var")[0]: v.device[-1] for v in layer.vars.Flatten()}
    parts = [f"named_block{i}/feed_forward/w_in_slice_{j}" for i in (0, 3) for j in (0, 1)]
    assert [lies[part] for part in parts] == ["0", "1", "2", "3"]
    tables = [f"named_embedding/table_slice_{j}" for j in (0, 1)]
    assert [lies[table] for table in tables] == ["0", "1"]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_an_error_that_says_so():
    bad = [*INPUTS[:2], INPUTS[2] * np.float32(np.nan), None]
    run = functools.partial(run_tf2, inputs=bad, do_eval=True, loss=None, num_devices=2)
    assert np.isnan(run(language([0, 2, 4], check_numerics="off")).outputs[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="the loss is not finite"):
        run(language([0, 2, 4]))


class Fickle(Masked):
    def FProp(self, theta, x, labels, weights, nothing):
        return super().FProp(theta, x, labels, weights, nothing)[0], labels + 1, weights, nothing


class Short(Masked):
    def FProp(self, theta, x, labels, weights, nothing):
        return super().FProp(theta, x, labels, weights, nothing)[:3]


class Weighty(Masked):
    """Has a weight whose dims have no names."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        self.CreateVariable("w", py_utils.WeightParams([2], py_utils.WeightInit.Constant(1.0)))


class Averaging(Masked):
    """Has the moving averages of a batch norm."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("averages", BatchNorm.Params().Set(input_dim=8))


def of_block(block):
    return language([0, 2, 4], layers=language_layers(2, block.Params()))


@pytest.mark.parametrize(
    ("params", "mesh", "error", "words"),
    [
        (of_block(Fickle), "layers:2", PipelineError, "hand on what is not floating"),
        (of_block(Short), "layers:2", PipelineError, "takes 4 arguments and returns 3"),
        (of_block(Averaging), "layers:2", PipelineError, "accumulators, .*lowering='placement'"),
        (of_block(Weighty), "layers:2", PipelineError, "weight 'w' of .*has no named dims"),
        (language([0, 2, 3, 4, 6]), "layers:2", PipelineError, ":2 has two stages a device"),
        (
            language([0, 3, 6], num_micro_batches=3),
            *("layers:2", PipelineError, "cannot be cut into 3 equal microbatches"),
        ),
        (
            language([0, 2, 4]),
            *(
                "layers:2;data:2 embed:data",
                LayoutError,
                r"'embed:data' cuts weights .*'placement'",
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*each place takes 2 in turn")
def test_what_cannot_be_one_program_is_an_error_before_the_first_step(params, mesh, error, words):
    with pytest.raises(error, match=words):
        run_tf2(params, INPUTS, loss=first, num_devices=mesh)


def test_a_clock_is_an_error():
    with executing(False, 2):
        layer = language([0, 2, 4]).Instantiate()
        layer.clock = ActionClock()
        with pytest.raises(PipelineError, match="a clock is set"):
            layer.FPropDefaultTheta(*INPUTS)
