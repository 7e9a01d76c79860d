"""Tests of compiled passes: shared computations, and warnings about the others."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.recurrent import Home, Options, Stage, pipeline_loss
from pipemesh.recurrent.passes import compiling
from pipemesh.schedule import gpipe

X = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=[4, 4]).astype(np.float32)


def product(x, weight):
    return tf.tanh(tf.matmul(x, weight))


def without_kernel(x, weight):
    y = tf.matmul(x, weight)
    return y * tf.cast(tf.strings.length(tf.as_string(y[0, 0])), tf.float32)


def at_each_input(x, weight):
    """A random number in a branch, which depends on weights."""
    y = tf.matmul(x, weight)

    def draw():
        return tf.random.stateless_uniform([], [1, 2])

    return y * tf.cond(y[0, 0] > 0, draw, lambda: 2 + draw())


def trained(body=product, number=2, devices=1, mode="tf2", **options):
    """The loss of stages that compute `body`, and the gradients of their weights."""

    def forward(theta, carry, inputs, microbatch, step):
        return [body(inputs[0], theta[0])], []

    def end(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(inputs[0] ** 2)], []

    def build():
        weights = [tf.constant(WEIGHT) for i in range(number)]
        homes = [
            Home(tuple(f"CPU:{i * devices + k}" for k in range(devices)), 1) for i in range(number)
        ]
        stages = [
            Stage(f"s{i}", forward, [weight], [], home)
            for i, (weight, home) in enumerate(zip(weights, homes, strict=True))
        ]
        stages.append(Stage("end", end, [], [], f"CPU:{number * devices}"))
        schedule = gpipe(number + 1, 2)
        loss = pipeline_loss(stages, [tf.constant(X)], schedule, options=Options(**options))[0]
        return [loss, *tf.gradients(loss, weights)]

    if mode == "tf2":
        return [t.numpy() for t in tf.function(build, autograph=False)()]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(build())


def without_weight(x, weight):
    return without_kernel(x, tf.eye(4)) + weight[0]


def elsewhere(x, weight):
    with tf.device("CPU:7"):
        return tf.matmul(x, weight)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"body": without_kernel}, r"\(AsString\) has no kernel of XLA"),
        ({"body": without_weight}, r"\(AsString\) has no kernel of XLA"),
        ({"body": at_each_input, "mode": "tf1"}, r"\(StatelessRandomUniformV2\) draws random num"),
        ({"body": elsewhere}, r"\(MatMul\) is pinned to .*CPU:7, but .* on CPU:0"),
        ({"devices": 2}, "a replica lies on 2 devices, and a computation of XLA on one"),
    ],
    ids=["kernel", "weightless", "draws", "pinned", "devices"],
)
@pytest.mark.filterwarnings("ignore:.* is not compiled, but runs")
def test_what_xla_does_not_take_is_named_and_runs_as_before(arguments, reason):
    with pytest.warns(RuntimeWarning, match=f"stage 's0': its pass F is not compiled.*{reason}"):
        found = trained(**arguments, compile=True)
    for got, wanted in zip(found, trained(**arguments), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def in_branches(x, weight):
    y = tf.matmul(x, weight)
    return y * tf.switch_case(tf.cast(y[0, 0] > 0, tf.int32), [lambda: 1.5, lambda: 2.5])


@pytest.mark.parametrize("mode", ["tf1", "tf2"])
def test_branches_are_compiled(mode):
    for got, wanted in zip(
        trained(in_branches, mode=mode, compile=True), trained(in_branches), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("mode", ["tf1", "tf2"])
def test_alike_stages_share_their_computations(mode, monkeypatch):
    """Two more stages need no more computations, and no product is outside of them."""
    made = []

    def lowered(function, device_type):
        made.append(function)

    monkeypatch.setattr(compiling, "why_not_compiled", lowered)
    trained(number=2, mode=mode, compile=True)
    few, made[:] = len(made), []
    with record_placement() as graphs:
        trained(number=4, mode=mode, compile=True)
    assert len(made) == few
    if mode == "tf2":
        nodes = [node for graph in graphs.partition_graphs for node in graph.node]
        # `F` and `B` of two microbatches of each stage, and of the end.
        assert sum("_XlaMustCompile" in node.attr for node in nodes) == 2 * 2 * 5
        assert "MatMul" not in {node.op for node in nodes}
