"""Wrong uses of the layers: each is one clear error before the first step, or simply works."""

import re
import sys
import warnings

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import layers, py_utils, rnn_cell, rnn_layers

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.layers import (
    FeatureExtractionLayer,
    FunctionLayer,
    PipeliningLayer,
    SeqLayer,
)
from pipemesh.schedule import gpipe
from tests.layers.blocks import WIDTH, Block, Weighted
from tests.layers.harness import cluster, executing, run_eagerly, run_tf2

X = np.random.default_rng(0).normal(size=[8, 3, WIDTH]).astype(np.float32)


class Scale(Weighted):
    """Multiplies by a weight, with little to trace."""

    shape = (WIDTH,)

    def FProp(self, theta, x, *rest):
        return (x * theta.w, *rest) if rest else x * theta.w


def scale(name):
    return Scale.Params().Set(name=name)


def call(function, name="call"):
    return FunctionLayer.Params().Set(name=name, function=function)


def dense(name="dense"):
    return layers.FCLayer.Params().Set(name=name, input_dim=4, output_dim=4)


def stage(name, *sub, **kwargs):
    return FeatureExtractionLayer.Params().Set(name=name, sub=list(sub), **kwargs)


def stages(last=None):
    """Two stages; the second one may end in a function."""
    heads = [call(last, "head")] if last else []
    return [stage("s0", scale("scale0")), stage("s1", scale("scale1"), *heads)]


def pipelined(cells, **kwargs):
    return PipeliningLayer.Params().Set(
        **{"name": "stack", "cell_tpl": cells, "num_micro_batches": 4, **kwargs}
    )


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def instantiate(params):
    with executing(False, 2):
        params.Instantiate()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cell_tpl": stages()[0]}, r"cell_tpl is the Params of one layer; .*: \[params\]"),
        ({"before_tpl": [dense("")]}, r"before_tpl\[0\], a FCLayer, has no name"),
        ({"before_tpl": [dense("s0")]}, "before_tpl and cell_tpl both have a layer named 's0'"),
        ({"fprop_dtype": "bf16"}, "fprop_dtype is 'bf16'; it must be a floating dtype"),
    ],
)
def test_params_of_the_wrong_kind_are_errors_when_the_layer_is_made(values, message):
    for layer in (PipeliningLayer, SeqLayer):
        params = layer.Params().Set(**{"name": "stack", "cell_tpl": stages(), **values})
        with pytest.raises(PipelineError, match=f"^stack: {message}"):
            instantiate(params)


def test_what_is_no_schedule_is_an_error_that_lists_them():
    for schedule in (None, gpipe, ""):
        with pytest.raises(ScheduleError, match=r"^stack: .*1f1b.* interleaved:V.* zb_h1"):
            instantiate(pipelined(stages(), schedule=schedule))


@pytest.mark.parametrize(
    ("sub", "kwargs", "message"),
    [
        ([[dense()]], {}, r"sub\[0\] is a list, not the Params of a layer"),
        ([dense(), dense()], {}, r"sub\[0\] and \[1\] are both named 'dense'"),
        ([dense()], {"act_fetch_layers": "dense"}, r"act_fetch_layers is 'dense'; .*\['dense'\]"),
        (
            [dense()],
            {"act_fetch_layers": ["nope"], "num_act_outputs": 1},
            r"act_fetch_layers names \['nope'\], but the layers are \['dense'\]",
        ),
        ([dense()], {"num_act_outputs": 1}, "num_act_outputs is 1; .* it must be 0"),
        ([dense()], {"num_act_inputs": "1"}, "num_act_inputs is '1'; it must be a whole number"),
        ([dense()], {"num_act_inputs": -1}, "num_act_inputs is -1; it must be at least 0"),
    ],
)
def test_a_stage_of_the_wrong_parts_is_an_error(sub, kwargs, message):
    with pytest.raises(PipelineError, match=f"^stage: {message}"):
        instantiate(stage("stage", *sub, **kwargs))


def test_fetching_from_a_layer_that_keeps_nothing_is_an_error():
    params = stage("stage", dense(), act_fetch_layers=["dense"], num_act_outputs=1)
    with pytest.raises(PipelineError, match=r"a FCLayer keeps no activation .*FetchLayer"):
        run_tf2(params, [X])


def positive(x):
    return tf.boolean_mask(x, x[:, 0, 0] > -1e9)


def mean_of_batch(axis, keepdims):
    return lambda x: tf.reduce_mean(x, axis=axis, keepdims=keepdims)


INSIDE = {"loss_inside": True}
NOT_CUT = r"of the last stage \('s1'\) has shape .* once for eac"
NESTED = "exactly one NestedMap in and out, but "


@pytest.mark.parametrize(
    ("last", "kwargs", "inputs", "message"),
    [
        # Inputs that cannot be cut.
        (None, {}, [], "was given no tensor"),
        (None, {}, [None], "was given no tensor"),
        (None, {}, [X, np.float32(1)], r"args\.1 has shape \(\) and no dim 0 \(batch_dim\)"),
        (None, {}, [X, X[:4]], r"sizes 4 \(args\.1\), 8 \(args\.0\) in dim 0 \(batch_dim\)"),
        (None, {}, [{"x": X, "y": X[:6]}], r"batch sizes 6 \(args\.0\.y\), 8 \(args\.0\.x\)"),
        (None, {"nested_map_fprop": True}, [X], f"{NESTED}args are .*ensor; wrap them"),
        (None, {"nested_map_fprop": True}, [X, None], f"{NESTED}args are .*ensor, NoneType"),
        (None, {"nested_map_fprop": True}, [{"x": X}], f"{NESTED}args are dict"),
        (None, {"nested_map_fprop": True}, [], f"{NESTED}args are nothing"),
        # Outputs that cannot be joined.
        (mean_of_batch(0, True), {}, [X], NOT_CUT),
        (lambda x: np.ones([2, 3], np.float32), {}, [X], NOT_CUT),
        (lambda x: tf.concat(tf.split(x, 2, axis=-1), axis=0), {}, [X], NOT_CUT),
        (positive, {}, [X], r"shape \(None, 3, 4\); .* tf\.ensure_shape"),
        # By chance they have the size of a microbatch.
        (mean_of_batch([0, 1], False), {"num_micro_batches": 2}, [X], "and for the whole batch"),
        (mean_of_batch([0, 1, 2], True), {"num_micro_batches": 8}, [X], "and for the whole batch"),
        (lambda x: None, {}, [X], "^stack: stage .*'s1' returns no tensor"),
        (lambda x: (x, [object()]), {}, [X], r"^stack: stage .*outputs\.1\.0 is an object"),
        (lambda x: 1.0, {}, [X], r"a scalar \(outputs\.0\).* set loss_inside=True"),
        # Heads.
        (
            lambda x: (tf.reduce_mean(x), float(x.shape[0])),
            INSIDE,
            [X],
            r"'s1'.*is a mean, Mean.*summed weight.*return tf",
        ),
        (
            lambda x: (tf.reduce_sum(x), 2.0, tf.reduce_sum(x, axis=0)),
            INSIDE,
            [X],
            "output 2 of the last stage .* not cut along the batch",
        ),
    ],
)
def test_what_cannot_be_cut_or_joined_is_an_error(last, kwargs, inputs, message):
    with pytest.raises(PipelineError, match=message):
        run_tf2(pipelined(stages(last), **kwargs), inputs, num_devices=2, loss=first)


def test_what_can_be_joined():
    expected = run_tf2(pipelined(stages()), [X], num_devices=2)
    params = pipelined(stages(lambda x: tf.ensure_shape(positive(x), x.shape)))
    run_tf2(params, [X], num_devices=2).assert_close(expected)
    # The same for each example.
    params = pipelined(stages(lambda x: (x, tf.ones([x.shape[0]]))), num_micro_batches=8)
    assert run_tf2(params, [X], num_devices=2).outputs[1].shape == (8,)
    # A mean for each microbatch with weight 1 is a loss.
    params = pipelined(stages(lambda x: (tf.reduce_mean(x), 1)), **INSIDE)
    assert run_tf2(params, [X], num_devices=2, loss=first).outputs[1] == 4


class Nested(Block):
    """A block that takes and returns a dict with a list in it, and a tuple with None."""

    def FProp(self, theta, x, nothing=(None,)):
        if isinstance(x, dict):
            assert list(x) == ["a", "b"] and isinstance(x["b"], list) and nothing == (None,)
            x = x["a"] + 0.1 * (x["b"][0] - x["b"][1])
        x = super().FProp(theta, x)
        return {"a": x, "b": [2 * x, x + 1]}, (None,)


def test_lists_tuples_and_dicts_stay_what_they_are_between_stages_and_outside():
    kinds = set()

    def loss(outputs):
        kinds.add(str(tf.nest.map_structure(lambda leaf: leaf is not None, outputs)))
        return tf.reduce_sum(outputs[0]["a"] ** 2) + tf.reduce_sum(outputs[0]["b"][0])

    sub = [Nested.Params().Set(name=name) for name in "abc"]
    inputs = [{"a": X, "b": [X, X]}, (None,)]
    expected = run_eagerly(stage("stack", *sub), inputs, num_devices=2, loss=loss)
    cells = [stage("s0", *sub[:2]), stage("s1", *sub[2:])]
    result = run_eagerly(pipelined(cells), inputs, num_devices=2, loss=loss)
    assert len(kinds) == 1 and len(result.outputs) == 3 and len(result.grads) == 3
    result.assert_close(expected)


def test_a_nested_map_in_and_out_needs_no_flag(run):
    def function(x):
        return py_utils.NestedMap(y=[x.a, x.a + 1])

    params = pipelined([stage("s0", call(function))])
    outputs = run(params, [py_utils.NestedMap(a=X)], loss=None).outputs
    np.testing.assert_array_equal(outputs, [X, X + 1])


def test_a_sequence_without_stages_is_what_comes_before_them(run):
    params = SeqLayer.Params().Set(name="seq", before_tpl=[dense()])
    run(stage("plain", dense()), [X]).assert_close(run(params, [X]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_an_error_that_a_layer_raises_says_in_which_layer_and_with_what(run):
    with pytest.raises(ValueError, match="Dimensions must be equal") as found:
        run(pipelined(stages(lambda x: tf.matmul(x, tf.ones([5, 4])))), [X], num_devices=2)
    (note,) = found.value.__notes__
    assert re.fullmatch(r"in layer 'head' of 's1', which was given float32 \[[28], 3, 4\]", note)


@pytest.mark.parametrize("cls", [PipeliningLayer, SeqLayer])
def test_an_input_in_the_place_of_theta_is_an_error(cls):
    stack = cls.Params().Set(name="stack", cell_tpl=stages())
    with executing(False, 2):
        with pytest.raises(PipelineError, match=r"argument of FProp is .* not theta; call FPropD"):
            stack.Instantiate().FProp(tf.constant(X))


def test_a_mesh_of_another_length_is_one_warning(eagerly):
    for devices, message in ((4, "its 2 stages lie on 2: the other devices idle"), (1, None)):
        with cluster(devices), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            py_utils.GetOrCreateGlobalStepVar()
            stack = pipelined(stages()).Instantiate()
            for _ in range(2):
                stack.FPropDefaultTheta(tf.constant(X))
        found = [str(one.message) for one in told if "places along" in str(one.message)]
        assert len(found) == (message is not None) and all(message in text for text in found)
    with cluster(2), pytest.warns(UserWarning, match="each place takes 2 in turn; .*looped_bfs:2"):
        pipelined([stage(f"s{i}", scale(f"scale{i}")) for i in range(4)]).Instantiate()


def test_a_cell_of_lingvo_that_draws_is_refused_by_name(run):
    cell = rnn_cell.LSTMCellSimple.Params().Set(
        name="cell", num_input_nodes=WIDTH, num_output_nodes=WIDTH, zo_prob=0.3
    )
    rnn = rnn_layers.FRNN.Params().Set(name="rnn", cell=cell)
    with pytest.raises(PipelineError, match=r"layer 'rnn' of 's0': .*zoneout.*zo_prob=0"):
        run(pipelined([stage("s0", rnn)]), [X, X[..., :1] * 0])
