"""State accumulated over microbatches."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, bn_layers, layers, py_utils

from pipemesh.errors import PipelineError
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2
from tests.layers.stacks import stack_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 3, 4]).astype(np.float32)
# Microbatches have different numbers of rows, one of them none.
PADDINGS = (np.arange(8)[:, None] + np.arange(3) < 3).astype(np.float32)


class Normed(base_layer.BaseLayer):
    """A product and a batch normalization, of which there may be a second call."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("norm", bn_layers.BatchNormLayer.Params().Set(dim=4, decay=0.9), "")
        p.Define("calls", 1, "")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("dense", layers.FCLayer.Params().Set(input_dim=4, output_dim=4))
        self.CreateChild("norm", self.params.norm)

    def FProp(self, theta, x, paddings):
        y = self.dense.FProp(theta.dense, x)
        for _ in range(self.params.calls):
            y = self.norm.FProp(theta.norm, y, paddings)
        return y, paddings


def model(num_microbatches=1, **kwargs):
    layers = [Normed.Params().Set(name=f"layer{i}") for i in range(2)]
    return stack_of(layers, [0, 1, 2], num_micro_batches=num_microbatches, **kwargs)


def test_one_microbatch_equals_the_plain_stack():
    wanted, found = [
        run_eagerly(model(pipelined=pipelined), [X, PADDINGS], num_devices=2, steps=2)
        for pipelined in (False, True)
    ]
    # The averages are among the weights.
    found.assert_close(wanted, atol=1e-5)


@pytest.mark.slow
def test_averages_are_those_of_the_whole_batch():
    wanted = run_tf2(model(pipelined=False), [X, PADDINGS], num_devices=2).weights
    found = run_tf2(model(2), [X, PADDINGS], num_devices="layers:2;data:2").weights
    # Of the first layer: what comes later has been normalized by microbatch.
    for name in ("layer0/norm/moving_mean/var:0", "layer0/norm/moving_variance/var:0"):
        np.testing.assert_allclose(found[name], wanted[name], 1e-5, 1e-6)


def test_lingvos_learner_finds_the_updates_of_a_graph():
    with tf.Graph().as_default(), cluster(2):
        py_utils.GetOrCreateGlobalStepVar()
        averages = []
        for pipelined in (False, True):
            layer = model(pipelined=pipelined).Set(name=f"stack{pipelined}")
            for number, cell in enumerate(layer.cell_tpl):
                cell.sub[0].name = f"layer{pipelined}{number}"
            stack = layer.Instantiate()
            loss = tf.reduce_sum(stack.FPropDefaultTheta(tf.constant(X), tf.constant(PADDINGS))[0])
            known = tf.compat.v1.get_collection(py_utils.BATCH_NORM_UPDATES)
            updates, _ = py_utils.FindRelevantBatchNormUpdates(loss, known)
            assert len(updates) == 4
            averages.append((updates, stack.vars.Flatten()))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for a, b in zip(averages[0][1], averages[1][1], strict=True):
                session.run(b.assign(a))
            session.run([updates for updates, _ in averages])
            wanted, found = session.run([variables for _, variables in averages])
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(b, a, 1e-5, 1e-6)


def test_what_cannot_be_averaged_once_is_refused_by_name():
    twice, adaptive = model(), model()
    twice.cell_tpl[0].sub[0].calls = 2
    adaptive.cell_tpl[0].sub[0].norm.use_moving_avg_in_training = True
    for params, message in (
        (twice, r"layer0\.norm: in a pipeline a BatchNormLayer cannot be called twice a step"),
        (adaptive, r"layer0\.norm: .*leave use_moving_avg_in_training unset"),
    ):
        with pytest.raises(PipelineError, match=message):
            run_tf1(params, [X, PADDINGS], num_devices=2)
