"""Stacks of alike stages as one loop over ticks equal the plain stack."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from pipemesh.errors import PipelineError, PipemeshError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer
from pipemesh.layers.pipeline.alike_stages import differences, simd_cut, simd_split
from pipemesh.recurrent import ActionClock
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline.stacks import plain
from tests.layers.pipeline.test_pipelining import cut
from tests.layers.pipeline.test_simd_stack import layers_of, stack

X = np.random.default_rng(0).normal(size=[8, 3, WIDTH]).astype(np.float32)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


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


def simd(cells, num_micro_batches, **kwargs):
    return PipeliningLayer.Params().Set(
        name="stack",
        cell_tpl=cells,
        num_micro_batches=num_micro_batches,
        lowering="simd",
        **kwargs,
    )


@functools.cache
def expected(run):
    return run(plain(uncounted(4)), [X], steps=2)


@pytest.mark.parametrize(
    ("run", "num_stages", "schedule", "num_devices", "num_micro_batches"),
    [
        (run_tf2, 1, "gpipe", 1, 4),
        (run_tf2, 4, "gpipe", 4, 2),
        (run_tf1, 4, "looped_bfs:2", 2, 4),
        (run_eagerly, 2, "gpipe", 2, 8),
    ],
)
def test_everything_equals_the_plain_model_with_dropout_on(
    run, num_stages, schedule, num_devices, num_micro_batches
):
    params = simd(cut(uncounted(4), num_stages), num_micro_batches, schedule=schedule)
    result = run(params, [X], steps=2, num_devices=num_devices)
    result.assert_close(expected(run_tf1 if run is run_tf1 else run_tf2), **CLOSE)
    assert set(result.weights) == {f"block{i}/w/var:0" for i in range(4)}


def test_eval_has_no_dropout():
    result = run_tf2(simd(cut(uncounted(2), 2), 4), [X], num_devices=2, do_eval=True)
    result.assert_close(run_tf2(plain(uncounted(2)), [X], do_eval=True))


def test_what_has_no_gradient_and_what_is_none_goes_along():
    ids = np.arange(8, dtype=np.int32)
    mask = np.ones([8, 3], bool)
    inputs = [X, None, ids, mask]
    result = run_tf1(simd(cut(uncounted(2), 2), 4), inputs, steps=1, num_devices=2)
    np.testing.assert_array_equal(result.outputs[1], ids)
    result.assert_close(run_tf1(plain(uncounted(2)), inputs, steps=1), **CLOSE)


def test_batch_dim_1_and_layers_before():
    x = np.ascontiguousarray(X.swapaxes(0, 1))
    before = Uncounted.Params().Set(name="before")
    expected = run_tf2(plain([before.Copy(), *uncounted(2)]), [x], steps=1)
    params = simd(cut(uncounted(2), 2), 4, batch_dim=1, before_tpl=[before])
    run_tf2(params, [x], steps=1, num_devices=2).assert_close(expected, **CLOSE)


@pytest.mark.slow
def test_the_gradient_of_the_inputs_and_bfloat16():
    def run(params):
        py_utils.SetEagerMode(False, test_mode=True)
        with tf.Graph().as_default(), cluster(2):
            step = py_utils.GetOrCreateGlobalStepVar()
            x = tf.constant(X)
            layer = params.Instantiate()
            y = layer.FPropDefaultTheta(x)
            variables = layer.vars.Flatten()
            grads = tf.gradients(tf.reduce_sum(tf.cast(y, tf.float32) ** 2), [x, *variables])
            with tf.compat.v1.Session() as session:
                session.run(step.initializer)
                for number, variable in enumerate(variables):
                    variable.load(np.full([WIDTH, WIDTH], 0.1 * (number + 1)), session)
                return session.run([y, *grads])

    params = simd(cut(uncounted(2), 2), 4, fprop_dtype=tf.bfloat16)
    got, wanted = run(params), run(params.Copy().Set(lowering="placement"))
    assert got[0].dtype == tf.bfloat16.as_numpy_dtype
    for mine, theirs in zip(got, wanted, strict=True):
        # Of few bits; TensorFlow fuses other operations in a loop.
        scale = np.abs(theirs.astype(np.float32)).max()
        np.testing.assert_allclose(
            mine.astype(np.float32), theirs.astype(np.float32), atol=0.02 * scale
        )


class Strict(Uncounted):
    """Divides by a norm, and checks what it is given, which would fail for zeros."""

    def FProp(self, theta, x):
        with tf.control_dependencies([tf.debugging.assert_greater(tf.norm(x), 0.0)]):
            return super().FProp(theta, tf.debugging.check_numerics(x / tf.norm(x), "strict"))


def test_at_ticks_without_work_no_check_fails():
    sub = [Strict.Params().Set(name=f"block{i}", rate=0.0) for i in range(2)]
    x = X + 2.0
    # A norm of a microbatch is not one of the batch, so the plain stack is another model.
    wanted = run_tf1(simd(cut(sub, 2), 2).Set(lowering="placement"), [x], steps=1)
    result = run_tf1(simd(cut(sub, 2), 2), [x], steps=1, num_devices=2)
    result.assert_close(wanted, **CLOSE)


def test_an_output_that_is_not_finite_is_an_error(run):
    x = X.copy()
    x[5] = np.nan
    sub = uncounted(2, rate=0.0)
    with pytest.raises((tf.errors.InvalidArgumentError, PipelineError), match="output"):
        run(simd(cut(sub, 2), 4), [x], num_devices=2)


def test_the_graph_does_not_grow_with_the_microbatches():
    def size(num_micro_batches):
        py_utils.SetEagerMode(False, test_mode=True)
        with tf.Graph().as_default() as graph, cluster(2):
            py_utils.GetOrCreateGlobalStepVar()
            layer = simd(cut(uncounted(2), 2), num_micro_batches).Instantiate()
            tf.gradients(layer.FPropDefaultTheta(tf.constant(X)), layer.vars.Flatten())
            return len(graph.get_operations())

    assert size(2) == size(8)


def fc(name, **kwargs):
    params = layers.FCLayer.Params().Set(name=name, input_dim=WIDTH, output_dim=WIDTH)
    return params.Set(**kwargs)


def stages(*subs):
    return [
        FeatureExtractionLayer.Params().Set(name=f"stage{i}", sub=sub) for i, sub in enumerate(subs)
    ]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            stages([fc("a")], [fc("b", activation="TANH")]),
            "layer 'a' has activation 'RELU' and layer 'b' has activation 'TANH'",
        ),
        (
            stages([fc("a")], uncounted(1)),
            "layer 'a' is a FCLayer and layer 'block0' is an Uncounted",
        ),
        (
            stages([fc("a"), fc("b")], [fc("c")]),
            "stage 'stage0' has 2 layers and stage 'stage1' has 1",
        ),
        (
            stages([fc("a")], [fc("b", params_init=py_utils.WeightInit.Gaussian(0.5))]),
            "layer 'a' has params_init.*layer 'b' has params_init",
        ),
        (stages([fc("a")], [fc("b", output_dim=5)]), "layer 'b' has output_dim 5"),
    ],
)
def test_layers_that_are_not_alike_are_named_with_what_differs(cells, words):
    with pytest.raises(PipelineError, match=f"{words}.*lowering='placement'"):
        simd(cells, 2).Instantiate()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"lowering": "smd"}, "did you mean 'simd'"),
        ({"schedule": "1f1b"}, "use schedule='gpipe'"),
        ({"schedule": "zb_v", "cell_tpl": cut(uncounted(4), 4)}, "looped_bfs:V"),
        ({"remat": "none"}, "remat is 'none'"),
        ({"loop": False}, "loop is False"),
        ({"check_numerics": "all"}, "check_numerics is 'all'"),
        ({"loss_inside": True}, "put the head behind the stack"),
        ({"mesh_shape": "layers:2;data:2", "layout": "batch:data"}, "one device a stage"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_and_not_dropped(kwargs, words):
    with pytest.raises(PipemeshError, match=words):
        simd(cut(uncounted(2), 2), 2).Set(**kwargs).Instantiate()


@pytest.mark.parametrize("run_in", [run_tf1, run_tf2])
def test_what_only_the_graph_shows_is_an_error_before_the_first_step(run_in):
    with pytest.raises(PipelineError, match="'stage0' hands something from microbatch to micro"):
        run_in(simd(cut(blocks(2), 2), 2), [X], num_devices=2)
    wide = [fc(name, input_dim=WIDTH, output_dim=WIDTH + 1) for name in "ab"]
    with pytest.raises(PipelineError, match=r"'stage0' is float32 of shape .*it is given float32"):
        run_in(simd(stages(*[[layer] for layer in wide]), 2), [X[:, 0]], num_devices=2)
    fetching = cut(uncounted(1), 1)
    fetching[0].sub.append(layers.FetchLayer.Params().Set(name="fetch"))
    fetching[0].Set(act_fetch_layers=["fetch"], num_act_outputs=1)
    with pytest.raises(PipelineError, match="returns 2 tensors and is given 1"):
        run_in(simd(fetching, 2), [X])


def test_a_clock_and_a_forecast_of_memory_are_errors():
    with tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        layer = simd(cut(uncounted(2), 2), 2).Instantiate()
        with pytest.raises(PipelineError, match="memory is predicted for lowering='placement'"):
            layer.PredictMemory(tf.constant(X))
        layer.clock = ActionClock()
        with pytest.raises(PipelineError, match="clock is"):
            layer.FPropDefaultTheta(tf.constant(X))


# The alike layers of a stack with the loss inside.


def test_the_longest_run_of_alike_layers_is_found():
    assert simd_cut(stack([0, 3, 6])) == (1, 1)
    bare = layers_of()[1:-1]
    assert simd_cut(stack([0, 2, 4], layers=bare)) == (0, 0)
    # Two of one kind before four of another.
    other = [layer.Copy().Set(name=f"other{i}") for i, layer in enumerate(bare[:2])]
    for layer in other:
        layer.random_seed = 7
    assert simd_cut(stack([0, 4, 6], layers=[*other, *bare])) == (2, 0)


def test_params_are_split_at_the_run():
    params = stack([0, 3, 6])
    before, stages, behind = simd_split(params, params.cell_tpl)
    assert [[layer.name for layer in cell.sub] for cell in (before, *stages, behind)] == [
        ["named_embedding"],
        ["named_block0", "named_block1"],
        ["named_block2", "named_block3"],
        ["named_head"],
    ]
    assert [cell.name for cell in (before, behind)] == ["s0_before", "s1_behind"]
    assert [len(cell.sub) for cell in params.cell_tpl] == [3, 3]


def nested():
    params = stack([0, 3, 6])
    inner = params.cell_tpl[1].sub[0]
    params.cell_tpl[1].sub[0] = FeatureExtractionLayer.Params().Set(name="inner", sub=[inner])
    return params


def fetching():
    params = stack([0, 3, 6])
    params.cell_tpl[0].Set(act_fetch_layers=["named_block0"], num_act_outputs=1)
    return params


FC = [layers.FCLayer.Params().Set(name=f"fc{i}", input_dim=4, output_dim=4) for i in range(4)]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (stack([0, 2, 6]), "so that stages have 3, 3 layers, but in cell_tpl they have 2, 4"),
        (stack([0, 2, 4, 6]), "3 stages as many alike layers, but there are 4 .Masked."),
        (nested(), "'s1' is a FeatureExtractionLayer or has stages inside"),
        (fetching(), "'s0' fetches or hands on activations"),
        (stack([0, 2, 4], layers=FC), "the alike layers are FCLayers"),
        (stack([0, 3, 6], tied={"named_block1.norm": "named_block0.norm"}), "which .* stacks"),
        (stack([0, 3, 6], schedule="1f1b"), "lowering is 'simd'.* use schedule='gpipe'"),
        (stack([0, 3, 6], fprop_dtype=tf.float16), "the loss is not scaled"),
        (stack([0, 3, 6], state_dtype=tf.bfloat16), "activations keep their dtype"),
        (stack([0, 3, 6], strict_devices=True), "strict_devices is True"),
        (stack([0, 3, 6], check_numerics="results"), "the loss alone is looked at"),
    ],
)
def test_unsupported_stacks_with_the_loss_inside_are_errors(params, words):
    with pytest.raises(PipemeshError, match=words) as found:
        params.Instantiate()
    assert isinstance(found.value, PipelineError) or "schedule" in words


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
