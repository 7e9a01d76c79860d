"""What a pipelined layer must survive, seen from outside: one test a case."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import DeviceError, PipelineError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer
from pipemesh.recurrent import explain
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import cluster, executing, initial_value, run_eagerly, squared_sum

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 3, WIDTH]).astype(np.float32)


def pipelined(layers, boundaries, num_micro_batches=4, **kwargs):
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"stage{i}", sub=layers[begin:end])
        for i, (begin, end) in enumerate(itertools.pairwise(boundaries))
    ]
    return PipeliningLayer.Params().Set(
        name="stack", cell_tpl=cells, num_micro_batches=num_micro_batches, **kwargs
    )


@pytest.mark.slow
def test_another_cut_of_the_same_layers_leaves_everything_unchanged(run):
    first, other = [
        run(pipelined(blocks(4), boundaries), [X], steps=1, num_devices=len(boundaries) - 1)
        for boundaries in ([0, 2, 4], [0, 1, 3, 4])
    ]
    other.assert_close(first, rtol=1e-4, atol=1e-5)


def known_value(variable):
    """The same for all layers, so that tied weights can be compared with equal ones."""
    return np.random.default_rng(5).normal(scale=0.3, size=variable.shape).astype(np.float32)


def fill(layer):
    for variable in layer.vars.Flatten():
        variable.assign(known_value(variable))


@pytest.mark.slow
def test_train_eval_train_eval():
    """Evaluation leaves no trace in training, and training is seen by evaluation."""
    plain = FeatureExtractionLayer.Params().Set(name="plain", sub=blocks(4))
    histories = []
    for params, num_devices in ((plain, 1), (pipelined(blocks(4), [0, 2, 4]), 2)):
        with executing(True, num_devices) as step:
            layer = params.Instantiate()
            fill(layer)
            variables = layer.vars.Flatten()
            optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
            seen = []
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = squared_sum(layer.FPropDefaultTheta(tf.constant(X)))
                grads = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(grads, variables, strict=True))
                step.assign_add(1)
                with cluster(num_devices, do_eval=True):
                    y = layer.FPropDefaultTheta(tf.constant(X))
                seen += [float(loss), y.numpy(), *(v.numpy() for v in variables)]
            histories.append(seen)
    for a, b in zip(*histories, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert seen[0] != seen[len(seen) // 2]


@pytest.mark.slow
def test_weights_saved_at_4_stages_are_restored_at_2_and_at_1(tmp_path):
    def train(num_stages, restore, steps):
        boundaries = range(0, 5, 4 // num_stages)
        with executing(False, num_stages) as step:
            layer = pipelined(blocks(4), boundaries).Instantiate()
            loss = squared_sum(layer.FPropDefaultTheta(tf.constant(X)))
            optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
            variables = layer.vars.Flatten()
            train_op = optimizer.apply_gradients(
                optimizer.compute_gradients(loss, variables), global_step=step
            )
            saver = tf.compat.v1.train.Saver()
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                if restore:
                    saver.restore(session, restore)
                else:
                    for variable in variables:
                        variable.load(initial_value(variable), session)
                    for _ in range(2):
                        session.run(train_op)
                    saver.save(session, str(tmp_path / "ckpt"))
                return [session.run([loss, train_op])[0] for _ in range(steps)]

    uninterrupted = train(4, None, 2)
    for num_stages in (2, 1):
        resumed = train(num_stages, str(tmp_path / "ckpt"), 2)
        np.testing.assert_allclose(resumed, uninterrupted, rtol=1e-4)


def instantiate_tied(params):
    """Layers of one name share their variables where lingvo's store of variables allows reuse."""
    scope = tf.compat.v1.get_variable_scope()
    with (
        py_utils.VariableStore(),
        tf.compat.v1.variable_scope(scope, reuse=tf.compat.v1.AUTO_REUSE),
    ):
        return params.Instantiate()


class Quiet(Block):
    """Without noise, which is keyed by the name of the layer."""

    def FProp(self, theta, x):
        return x + tf.nn.tanh(tf.einsum("...i,ij->...j", x, theta.w))


def tied_stack(names):
    params = pipelined([Quiet.Params().Set(name=name) for name in names], [0, 1, 2, 3])
    for cell in params.cell_tpl:
        # Else layers of one name have weights of their own.
        cell.child_variable_scope_override = {"tied": []}
    return params


TIED = tied_stack(["tied", "middle", "tied"])
UNTIED = tied_stack(["tied", "middle", "other"])


def tied_results_tf2(params, path):
    with executing(True, 3):
        layer = instantiate_tied(params)
        fill(layer)
        variables = {v.name: v for v in layer.vars.Flatten()}
        with tf.GradientTape() as tape:
            loss = squared_sum(layer.FPropDefaultTheta(tf.constant(X)))
        grads = tape.gradient(loss, variables)
        checkpoint = tf.train.Checkpoint(weights=layer.vars.Flatten())
        saved = [name for name, _ in tf.train.list_variables(checkpoint.save(path))]
        saved = [name for name in saved if name.startswith("weights")]
        return float(loss), {n: g.numpy() for n, g in grads.items()}, len(saved)


def tied_results_tf1(params, path):
    with executing(False, 3):
        layer = instantiate_tied(params)
        variables = {v.name: v for v in layer.vars.Flatten()}
        loss = squared_sum(layer.FPropDefaultTheta(tf.constant(X)))
        grads = dict(zip(variables, tf.gradients(loss, list(variables.values())), strict=True))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for variable in variables.values():
                variable.load(known_value(variable), session)
            saved = tf.train.list_variables(tf.compat.v1.train.Saver().save(session, path))
            saved = [name for name, _ in saved if name != "global_step"]
            return *session.run([loss, grads]), len(saved)


@pytest.mark.parametrize("results", [tied_results_tf1, tied_results_tf2])
def test_a_weight_tied_across_first_and_last_stage_is_one_variable_with_the_sum(results, tmp_path):
    path = str(tmp_path / "ckpt")
    loss, grads, saved = results(TIED, path)
    plain = SeqLayer.Params().Set(name="plain", cell_tpl=TIED.cell_tpl)
    plain_loss, plain_grads, _ = results(plain, path)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert grads.keys() == plain_grads.keys() == {"tied/w/var:0", "middle/w/var:0"}
    assert saved == 2
    _, untied, saved = results(UNTIED, path)
    assert saved == 3
    both = untied["tied/w/var:0"] + untied["other/w/var:0"]
    for got, want in (
        (grads["tied/w/var:0"], plain_grads["tied/w/var:0"]),
        (grads["middle/w/var:0"], plain_grads["middle/w/var:0"]),
        (grads["tied/w/var:0"], both),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


class Log(Block):
    """Not a number for what is negative."""

    def FProp(self, theta, x):
        return tf.math.log(super().FProp(theta, x))


# Blocks add no more than about 1.
POSITIVE = 10 + np.abs(X)
# In the third of four microbatches.
BAD = np.concatenate([POSITIVE[:4], -POSITIVE[4:6], POSITIVE[6:]])
MESSAGE = (
    "stage 'stage1' (/job:localhost/replica:0/task:0/device:CPU:1), layer 'log', microbatch 2, "
    "forward: its output is not finite (NaN or infinite)"
)


def with_log():
    layers = [*blocks(2, rate=0.0), Log.Params().Set(name="log", rate=0.0)]
    return pipelined(layers, [0, 2, 3])


def test_nan_is_an_error_in_one_line_when_the_layer_is_called_eagerly():
    run_eagerly(with_log(), [POSITIVE], num_devices=2)
    with pytest.raises(PipelineError) as caught:
        run_eagerly(with_log(), [BAD], num_devices=2)
    assert str(caught.value) == MESSAGE


@pytest.mark.slow
def test_nan_is_an_error_of_tensorflow_in_graphs(run):
    for check, message in (
        ("all", MESSAGE),
        (None, MESSAGE.replace("layer 'log', microbatch 2, forward: its", "forward: an")),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            run(with_log().Set(check_numerics=check), [BAD], num_devices=2)
        assert str(explain(caught.value)) == message
    params = with_log().Set(check_numerics="off")
    assert np.isnan(run(params, [BAD], num_devices=2).outputs[0]).any()


class Astray(Block):
    def FProp(self, theta, x):
        with tf.device("/job:localhost/replica:0/task:0/device:CPU:3"):
            return super().FProp(theta, x)


def test_strict_devices_is_a_param(run):
    layers = [*blocks(1), Astray.Params().Set(name="astray")]
    params = pipelined(layers, [0, 1, 2], strict_devices=True)
    with pytest.raises(DeviceError, match=r"of stage 'stage1' is pinned to .*CPU:3"):
        run(params, [X], num_devices=2)
    run(pipelined(blocks(2), [0, 1, 2], strict_devices=True), [X], num_devices=2)
