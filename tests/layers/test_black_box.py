"""What a pipelined layer must survive, seen from outside: one test a case."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import DeviceError, PipelineError
from pipemesh.layers import FunctionLayer
from pipemesh.recurrent.watch.explain import explain
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import (
    cluster,
    executing,
    run_eagerly,
    run_tf1,
    run_tf2,
    squared_sum,
)
from tests.layers.stacks import plain, stack_of

X = np.random.default_rng(0).normal(size=[8, 3, WIDTH]).astype(np.float32)


def pipelined(layers, bounds, **kwargs):
    return stack_of(layers, bounds, num_micro_batches=4, **kwargs)


@pytest.mark.slow
def test_train_eval_train_eval():
    """Evaluation leaves no trace in training, and training is seen by evaluation."""
    histories = []
    for params, num_devices in ((plain(blocks(2)), 1), (pipelined(blocks(2), [0, 1, 2]), 2)):
        with executing(True, num_devices) as step:
            layer = params.Instantiate()
            variables = layer.vars.Flatten()
            for variable in variables:
                variable.assign(np.random.default_rng(5).normal(scale=0.3, size=variable.shape))
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


class Quiet(Block):
    """Without noise, which is keyed by the name of the layer."""

    def FProp(self, theta, x):
        return x + tf.nn.tanh(tf.einsum("...i,ij->...j", x, theta.w))


class Sharing:
    """Params whose layers of one name share variables, as lingvo's store of them allows."""

    def __init__(self, params):
        self.params = params

    def Copy(self):
        return self

    def Instantiate(self):
        scope = tf.compat.v1.get_variable_scope()
        reuse = tf.compat.v1.variable_scope(scope, reuse=tf.compat.v1.AUTO_REUSE)
        with py_utils.VariableStore(), reuse:
            layer = self.params.Copy().Instantiate()
        assert len(set(map(id, layer.vars.Flatten()))) == 2
        return layer


def test_a_weight_tied_across_first_and_last_stage_is_one_variable(run):
    params = pipelined([Quiet.Params().Set(name=n) for n in ("tied", "b", "tied")], [0, 1, 2, 3])
    for cell in params.cell_tpl:
        # Else layers of one name have weights of their own.
        cell.child_variable_scope_override = {"tied": []}
    found, wanted = [
        run(Sharing(params.Copy().Set(pipelined=pipelined)), [X], num_devices=3)
        for pipelined in (True, False)
    ]
    assert found.grads.keys() == {"tied/w/var:0", "b/w/var:0"}
    found.assert_close(wanted)


class Log(Block):
    """Not a number for what is negative."""

    def FProp(self, theta, x):
        return tf.math.log(super().FProp(theta, x))


# Blocks add no more than about 1.
POSITIVE = 10 + np.abs(X)
# In the third of four microbatches.
BAD = np.concatenate([POSITIVE[:4], -POSITIVE[4:6], POSITIVE[6:]])
MESSAGE = (
    "stage 's1' (/job:localhost/replica:0/task:0/device:CPU:1), layer 'log', microbatch 2, "
    "forward: its output is not finite (NaN or infinite)"
)


def with_log():
    layers = [*blocks(2, rate=0.0), Log.Params().Set(name="log", rate=0.0)]
    return pipelined(layers, [0, 2, 3])


def test_nan_is_an_error_in_one_line_when_the_layer_is_called_eagerly():
    with pytest.raises(PipelineError) as caught:
        run_eagerly(with_log(), [BAD], num_devices=2)
    assert str(caught.value) == MESSAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "check", "message"),
    [
        (run_tf1, "all", MESSAGE),
        (
            run_tf2,
            None,
            MESSAGE.replace("layer 'log', microbatch 2, forward: its", "forward: an"),
        ),
    ],
)
def test_nan_is_an_error_of_tensorflow_in_graphs(run, check, message):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(with_log().Set(check_numerics=check), [BAD], num_devices=2)
    assert str(explain(caught.value)) == message


def test_nan_is_no_error_without_checks():
    params = with_log().Set(check_numerics="off")
    assert np.isnan(run_tf2(params, [BAD], num_devices=2, loss=None).outputs[0]).any()


class Astray(Block):
    def FProp(self, theta, x):
        with tf.device("/job:localhost/replica:0/task:0/device:CPU:3"):
            return super().FProp(theta, x)


def test_strict_devices_is_a_param(run):
    layers = [*blocks(1), Astray.Params().Set(name="astray")]
    params = pipelined(layers, [0, 1, 2], strict_devices=True)
    with pytest.raises(DeviceError, match=r"of stage 's1' is pinned to .*CPU:3"):
        run(params, [X], num_devices=2)


def test_an_error_may_be_explained_when_the_cluster_is_left(eagerly):
    """It asked for devices of the cluster that was entered by then, and that was another error."""
    divide = FunctionLayer.Params().Set(function=lambda x: x / tf.reduce_min(x))
    layers = [divide.Copy().Set(name=f"f{i}") for i in range(2)]
    with cluster("layers:2;data:2"), py_utils.VariableStore():
        stack = stack_of(layers, [0, 1, 2], num_micro_batches=2).Instantiate()
        step = tf.function(lambda x: stack.FProp(stack.theta, x))
        with pytest.raises(tf.errors.OpError) as caught:
            step(tf.zeros([8, 3]))
    told = str(stack.Explain(caught.value))
    assert told.startswith("stage 's1'") and "not finite" in told
