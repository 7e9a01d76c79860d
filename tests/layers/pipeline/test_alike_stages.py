"""Stacks of alike stages as one loop over ticks equal the plain stack."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from pipemesh.errors import PipelineError, PlanError, ScheduleError
from pipemesh.layers import FeatureExtractionLayer
from pipemesh.layers.pipeline.alike_stages import differences, simd_cut, simd_split
from pipemesh.recurrent import ActionClock
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import executing, run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline.named_stacks import language, language_layers
from tests.layers.stacks import EXACT, equal_to_plain, stack_of

X = np.random.default_rng(0).normal(size=[8, 3, WIDTH]).astype(np.float32)
TWO = [0, 1, 2]


class Uncounted(Block):
    """Dense, dropout of three kinds; hands on what comes besides, and counts nothing."""

    def __init__(self, params):
        super().__init__(params)
        self._private_accumulators.clear()

    def FProp(self, theta, x, *rest):
        h = tf.nn.tanh(tf.tensordot(x, theta.w, 1))
        h = self.stateful.FProp(theta.stateful, self.keyed.FProp(theta.keyed, h))
        if not self.do_eval:
            h += 0.1 * tf.random.normal(h.shape, dtype=h.dtype)
        return (x + h, *rest) if rest else x + h


def uncounted(number, **kwargs):
    return [Uncounted.Params().Set(name=f"block{i}", **kwargs) for i in range(number)]


def simd(layers, bounds, **kwargs):
    return stack_of(layers, bounds, **{"num_micro_batches": 4, "lowering": "simd", **kwargs})


@pytest.mark.parametrize(
    ("run", "devices", "bounds", "number", "options"),
    [
        (run_tf2, 1, [0, 4], 4, {}),
        (run_tf2, 4, [0, 1, 2, 3, 4], 2, {}),
        (run_tf1, 2, [0, 1, 2, 3, 4], 4, {"schedule": "looped_bfs:2"}),
        (run_eagerly, 2, [0, 2, 4], 8, {}),
    ],
)
def test_everything_equals_the_plain_model_with_dropout_on(run, devices, bounds, number, options):
    params = simd(uncounted(4), bounds, num_micro_batches=number, **options)
    result = equal_to_plain(run, params, [X], devices, steps=2)
    assert set(result.weights) == {f"block{i}/w/var:0" for i in range(4)}


def test_evaluation_has_no_dropout():
    equal_to_plain(run_tf2, simd(uncounted(2), TWO), [X], 2, do_eval=True, **EXACT)


def test_what_has_no_gradient_and_what_is_none_goes_along():
    inputs = [X, None, np.arange(8, dtype=np.int32), np.ones([8, 3], bool)]
    result = equal_to_plain(run_tf1, simd(uncounted(2), TWO), inputs, 2, steps=1)
    assert result.outputs[1].dtype == np.int32


def test_batch_dim_1_and_layers_before():
    x = np.ascontiguousarray(X.swapaxes(0, 1))
    before = Uncounted.Params().Set(name="before")
    params = simd(uncounted(2), TWO, batch_dim=1, before_tpl=[before])
    equal_to_plain(run_tf2, params, [x], 2, steps=1)


@pytest.mark.slow
def test_stages_compute_in_bfloat16_as_a_placement_does():
    found, wanted = (
        run_tf1(
            simd(uncounted(2), TWO, fprop_dtype=tf.bfloat16, lowering=lowering),
            [X],
            num_devices=2,
            loss=lambda y: tf.reduce_sum(tf.cast(y, tf.float32) ** 2),
        )
        for lowering in ("simd", "placement")
    )
    assert found.outputs[0].dtype == tf.bfloat16.as_numpy_dtype
    pairs = [(found.outputs[0], wanted.outputs[0])]
    for mine, theirs in pairs + [(found.grads[name], grad) for name, grad in wanted.grads.items()]:
        # Of few bits; TensorFlow fuses other operations in a loop.
        mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
        np.testing.assert_allclose(mine, theirs, atol=0.02 * np.abs(theirs).max())


class Strict(Uncounted):
    """Divides by a norm, and checks what it is given, which would fail for zeros."""

    def FProp(self, theta, x):
        with tf.control_dependencies([tf.debugging.assert_greater(tf.norm(x), 0.0)]):
            return super().FProp(theta, tf.debugging.check_numerics(x / tf.norm(x), "strict"))


def test_at_ticks_without_work_no_check_fails():
    sub = [Strict.Params().Set(name=f"block{i}", rate=0.0) for i in range(2)]
    # A norm of a microbatch is not one of the batch, so the plain stack is another model.
    wanted, result = (
        run_tf1(
            simd(sub, TWO, num_micro_batches=2, lowering=lowering),
            [X + 2.0],
            steps=1,
            num_devices=devices,
        )
        for lowering, devices in (("placement", 1), ("simd", 2))
    )
    result.assert_close(wanted, rtol=1e-4, atol=1e-5)


def test_an_output_that_is_not_finite_is_an_error(run):
    x = X.copy()
    x[5] = np.nan
    with pytest.raises((tf.errors.InvalidArgumentError, PipelineError), match="output"):
        run(simd(uncounted(2, rate=0.0), TWO), [x], num_devices=2)


def test_the_graph_does_not_grow_with_the_microbatches():
    def size(number):
        with executing(False, 2):
            layer = simd(uncounted(2), TWO, num_micro_batches=number).Instantiate()
            tf.gradients(layer.FPropDefaultTheta(tf.constant(X)), layer.vars.Flatten())
            return len(tf.compat.v1.get_default_graph().get_operations())

    assert size(2) == size(8)


def fc(name, **kwargs):
    params = layers.FCLayer.Params().Set(name=name, input_dim=WIDTH, output_dim=WIDTH)
    return params.Set(**kwargs)


def pair(second):
    return simd([fc("a"), second], TWO)


def blocks_with(**kwargs):
    return simd(uncounted(2), TWO).Set(**kwargs)


def nested():
    params = language([0, 3, 6])
    inner = params.cell_tpl[1].sub[0]
    params.cell_tpl[1].sub[0] = FeatureExtractionLayer.Params().Set(name="inner", sub=[inner])
    return params


def fetching():
    params = language([0, 3, 6])
    params.cell_tpl[0].Set(act_fetch_layers=["named_block0"], num_act_outputs=1)
    return params


NORMS = {"named_block1.norm": "named_block0.norm"}
ONE_DEVICE = {"mesh_shape": "layers:2;data:2", "layout": "batch:data"}
SCHEDULED = "is 'simd'.* use schedule='gpipe'"
KINDS = {"did you mean 'simd'": PlanError, SCHEDULED: ScheduleError, "looped_bfs:V": ScheduleError}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            pair(fc("b", activation="TANH")),
            "layer 'a' has activation 'RELU' and layer 'b' has activation 'TANH'.*='placement'",
        ),
        (pair(uncounted(1)[0]), "layer 'a' is a FCLayer and layer 'block0' is an Uncounted"),
        (
            simd([fc("a"), fc("b"), fc("c")], [0, 2, 3]),
            "stage 's0' has 2 layers and stage 's1' has 1",
        ),
        (
            pair(fc("b", params_init=py_utils.WeightInit.Gaussian(0.5))),
            "layer 'a' has params_init.*layer 'b' has params_init",
        ),
        (pair(fc("b", output_dim=5)), "layer 'b' has output_dim 5"),
        (blocks_with(lowering="smd"), "did you mean 'simd'"),
        (blocks_with(schedule="1f1b"), SCHEDULED),
        (simd(uncounted(4), [0, 1, 2, 3, 4], schedule="zb_v"), "looped_bfs:V"),
        (blocks_with(remat="none"), "remat is 'none'"),
        (blocks_with(loop=False), "loop is False"),
        (blocks_with(check_numerics="all"), "check_numerics is 'all'"),
        (blocks_with(loss_inside=True), "put the head behind the stack"),
        (blocks_with(**ONE_DEVICE), "one device a stage"),
        (language([0, 2, 6]), "that stages have 3, 3 layers, but in cell_tpl they have 2, 4"),
        (language([0, 2, 4, 6]), "3 stages as many alike layers, but there are 4 .Masked."),
        (nested(), "'s1' is a FeatureExtractionLayer or has stages inside"),
        (fetching(), "'s0' fetches or hands on activations"),
        (language([0, 2, 4], layers=[*map(fc, "abcd")]), "the alike layers are FCLayers"),
        (language([0, 3, 6], tied=NORMS), "which .* stacks"),
        (language([0, 3, 6], schedule="1f1b"), SCHEDULED),
        (language([0, 3, 6], fprop_dtype=tf.float16), "the loss is not scaled"),
        (language([0, 3, 6], state_dtype=tf.bfloat16), "activations keep their dtype"),
        (language([0, 3, 6], strict_devices=True), "strict_devices is True"),
        (language([0, 3, 6], compile=True), "compile is True"),
        (language([0, 3, 6], check_numerics="results"), "the loss alone is looked at"),
    ],
)
def test_what_cannot_be_one_loop_is_an_error_and_not_dropped(params, words):
    with pytest.raises(KINDS.get(words, PipelineError), match=words):
        params.Instantiate()


@pytest.mark.parametrize("run_in", [run_tf1, run_tf2])
def test_what_only_the_graph_shows_is_an_error_before_the_first_step(run_in):
    with pytest.raises(PipelineError, match="'s0' hands something from microbatch to micro"):
        run_in(simd(blocks(2), TWO), [X], num_devices=2)
    wide = [fc(name, output_dim=WIDTH + 1) for name in "ab"]
    with pytest.raises(PipelineError, match=r"'s0' is float32 of shape .*it is given float32"):
        run_in(simd(wide, TWO), [X[:, 0]], num_devices=2)
    fetching = simd([*uncounted(1), layers.FetchLayer.Params().Set(name="fetch")], [0, 2])
    fetching.cell_tpl[0].Set(act_fetch_layers=["fetch"], num_act_outputs=1)
    with pytest.raises(PipelineError, match="returns 2 tensors and is given 1"):
        run_in(fetching, [X])


def test_a_clock_and_a_forecast_of_memory_are_errors():
    with tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        layer = simd(uncounted(2), TWO).Instantiate()
        with pytest.raises(PipelineError, match="memory is predicted for lowering='placement'"):
            layer.PredictMemory(tf.constant(X))
        layer.clock = ActionClock()
        with pytest.raises(PipelineError, match="clock is"):
            layer.FPropDefaultTheta(tf.constant(X))


def test_params_are_split_at_the_longest_run_of_alike_layers():
    bare = language_layers()[1:-1]
    assert simd_cut(language([0, 2, 4], layers=bare)) == (0, 0)
    # Two of one kind before four of another.
    other = [layer.Copy().Set(name=f"other{i}", random_seed=7) for i, layer in enumerate(bare[:2])]
    assert simd_cut(language([0, 4, 6], layers=[*other, *bare])) == (2, 0)
    params = language([0, 3, 6])
    assert simd_cut(params) == (1, 1)
    before, stages, behind = simd_split(params, params.cell_tpl)
    assert [[layer.name for layer in cell.sub] for cell in (before, *stages, behind)] == [
        ["named_embedding"],
        ["named_block0", "named_block1"],
        ["named_block2", "named_block3"],
        ["named_head"],
    ]
    assert [cell.name for cell in (before, behind)] == ["s0_before", "s1_behind"]
    assert [len(cell.sub) for cell in params.cell_tpl] == [3, 3]


class Graph(base_layer.BaseLayer):
    """Its `sub` are no layers, but pairs, as those of lingvo's GraphLayer."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("sub", None, "Pairs of a signature and a layer.")
        return p


def test_a_sub_that_is_no_list_of_layers_is_compared_too():
    """Layers that differed in such a field were taken for alike."""
    graphs = [
        Graph.Params().Set(name=f"graph{width}", sub=[("x->y", Uncounted.Params().Set(rate=width))])
        if width
        else Graph.Params().Set(name="none")
        for width in (0, 4, 4, 5)
    ]
    found = [[*differences(graphs[1], other, "layer")] for other in graphs]
    assert [len(texts) for texts in found] == [1, 0, 0, 1]
    assert "sub[0][1].rate 4" in found[3][0]
