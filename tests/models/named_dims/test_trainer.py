"""The loss curves of the examples do not depend on mesh, layout and lowering."""

import functools
import json
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError
from tests.models.named_dims import curves
from tests.warm import warm

PLANS = {
    "mnist": [
        ("data:1", ""),
        ("data:4", "batch:data"),
        ("model:2", "hidden:model"),
        ("data:2;model:2", "batch:data;hidden:model"),
        ("data:2;model:2", "rows:data;classes:model"),
        ("data:2;model:2;space:2", "batch:data;hidden:model;cols:space"),
    ],
    "toy": [
        ("data:8", "batch:data"),
        ("model:2", "hidden:model"),
        ("data:2;model:2", "io:data;hidden:model"),
    ],
    "toy relu": [("data:2;model:4", "batch:data;hidden:model")],
}
ALL = [(name, *plan) for name, plans in PLANS.items() for plan in plans]


def plain_loss(name, weights, batch):
    if name == "mnist":
        images, labels = batch
        pixels = images.reshape([len(images), -1])
        logits = tf.nn.relu(pixels @ tf.reshape(weights[0], [784, -1])) @ weights[1]
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(cross_entropy)
    hidden = batch[0] @ weights[0]
    if name == "toy relu":
        hidden = tf.nn.relu(hidden)
    return tf.reduce_mean(tf.square(hidden @ weights[1] - batch[0]))


@functools.cache
def plain_curve(name):
    """The same training with TensorFlow alone."""
    weights = []
    for weight in curves.NETWORKS[name]().weights:
        sizes = weight.shape.sizes
        weights.append(tf.Variable(weight.initializer(sizes, [0] * len(sizes), sizes, tf.float32)))
    data, losses = curves.batches(name), []
    for batch in data:
        with tf.GradientTape() as tape:
            losses.append(plain_loss(name, weights, batch))
        for weight, grad in zip(weights, tape.gradient(losses[-1], weights), strict=True):
            weight.assign_sub(curves.LEARNING_RATE[name] * grad)
    losses = np.array([*losses, plain_loss(name, weights, data[0])])
    assert losses[-1] < losses[0]
    return losses


@pytest.fixture(scope="module")
def simd():
    """Curve and communication of each plan."""
    plans = [(name, "simd", *plan) for name, *plan in ALL]
    done = subprocess.run(
        warm("-m", "tests.models.named_dims.curves"),
        input=json.dumps(plans),
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"after {len(lines)} plans:\n{done.stderr[-2000:]}"
    return dict(zip(ALL, map(json.loads, lines), strict=True))


@pytest.mark.parametrize(("name", "mesh", "layout"), ALL)
@pytest.mark.slow
def test_the_loss_curve_is_that_of_plain_tensorflow(name, mesh, layout, simd):
    losses, costs = curves.curve(name, "placement", mesh, layout)
    np.testing.assert_allclose(losses, plain_curve(name), rtol=2e-5)
    simd_losses, simd_costs = simd[name, mesh, layout]
    np.testing.assert_allclose(simd_losses, plain_curve(name), rtol=2e-5)
    assert costs == simd_costs


@pytest.mark.parametrize("lowering", ["placement", "simd"])
def test_a_layout_that_splits_two_dims_of_a_product_over_one_axis_is_refused(lowering):
    with pytest.raises(LayoutError, match="'rows:model' or 'hidden:model'"):
        curves.trainer("mnist", lowering, "model:2", "rows:model;hidden:model")
