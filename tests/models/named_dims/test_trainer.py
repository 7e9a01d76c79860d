"""The loss curves of the examples do not depend on mesh, layout and lowering."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from models.mnist.digits import load_digits
from models.mnist.network import MnistNetwork
from models.named_dims.trainer import TRAINERS
from models.toy import network as toy
from models.unet import volumes
from models.unet.network import UNet
from pipemesh.mesh import LayoutRules, Mesh

STEPS, BATCH = 6, 16
NETWORKS = {
    "mnist": lambda: MnistNetwork(BATCH, hidden_size=64, seed=3),
    "unet": lambda: UNet(4, side=4, num_channels=2, num_levels=1, seed=3),
    "toy": lambda: toy.ToyNetwork(BATCH, io_size=8, hidden_size=24, activation="none", seed=3),
    "toy relu": lambda: toy.ToyNetwork(BATCH, io_size=8, hidden_size=24, activation="relu", seed=3),
}
LEARNING_RATE = {"mnist": 0.1, "unet": 0.3, "toy": 0.5, "toy relu": 0.5}


@functools.cache
def batches(name):
    endless = {
        "mnist": lambda: load_digits()[0].batches(BATCH, 5),
        "unet": lambda: volumes.batches(4, side=4, seed=5),
    }.get(name, lambda: toy.batches(BATCH, 8, 5))()
    return list(itertools.islice(endless, STEPS))


def curve(name, lowering, mesh_text, layout):
    """The loss of each step, then that after the last, and the table of communication."""
    mesh, rules = Mesh.from_text(mesh_text), LayoutRules.from_text(layout)
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    trainer = TRAINERS[lowering](NETWORKS[name](), mesh, rules, devices, LEARNING_RATE[name])
    losses = [trainer.train_step(batch) for batch in batches(name)]
    return [*losses, trainer.forward(batches(name)[0])[0]], str(trainer.costs)


def plain_unet_loss(weights, images, classes):
    rest = iter(weights)

    def convolved(x):
        x = tf.nn.conv3d(x, next(rest), [1] * 5, "SAME")
        mean, variance = tf.nn.moments(x, [1, 2, 3], keepdims=True)
        return tf.nn.relu((x - mean) / tf.sqrt(variance + 1e-3) * next(rest) + next(rest))

    skip = convolved(images[..., None])
    x = convolved(tf.nn.max_pool3d(skip, 2, 2, "VALID"))
    filters = tf.linalg.matrix_transpose(next(rest))
    x = tf.nn.conv3d_transpose(x, filters, skip.shape, 2, "SAME")
    logits = convolved(tf.concat([skip, x], -1)) @ next(rest)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits))


def plain_loss(name, weights, batch):
    if name == "mnist":
        images, labels = batch
        pixels = images.reshape([len(images), -1])
        logits = tf.nn.relu(pixels @ tf.reshape(weights[0], [784, -1])) @ weights[1]
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(cross_entropy)
    if name == "unet":
        return plain_unet_loss(weights, *batch)
    hidden = batch[0] @ weights[0]
    if name == "toy relu":
        hidden = tf.nn.relu(hidden)
    return tf.reduce_mean(tf.square(hidden @ weights[1] - batch[0]))


@functools.cache
def plain_curve(name):
    """The same training with TensorFlow alone."""
    weights = []
    for weight in NETWORKS[name]().weights:
        sizes = weight.shape.sizes
        weights.append(tf.Variable(weight.initializer(sizes, [0] * len(sizes), sizes, tf.float32)))
    losses = []
    for batch in batches(name):
        with tf.GradientTape() as tape:
            losses.append(plain_loss(name, weights, batch))
        for weight, grad in zip(weights, tape.gradient(losses[-1], weights), strict=True):
            weight.assign_sub(LEARNING_RATE[name] * grad)
    losses = np.array([*losses, plain_loss(name, weights, batches(name)[0])])
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "layout"),
    [
        ("mnist", "data:1", ""),
        ("mnist", "data:2;model:2", "rows:data;classes:model"),
        ("mnist", "data:2;model:2;space:2", "batch:data;hidden:model;cols:space"),
        # `test_command` splits its rows.
        ("unet", "z:2;x:2", "depth:z;cols:x"),
        pytest.param(
            *("unet", "data:2;model:2", "batch:data;features:model"), marks=pytest.mark.exhaustive
        ),
        ("toy", "data:2;model:2", "io:data;hidden:model"),
        ("toy relu", "data:2;model:2", "batch:data;hidden:model"),
    ],
)
def test_the_loss_curve_is_that_of_plain_tensorflow(name, mesh, layout):
    (losses, costs), (simd_losses, simd_costs) = (
        curve(name, lowering, mesh, layout) for lowering in ("placement", "simd")
    )
    np.testing.assert_allclose(losses, plain_curve(name), rtol=2e-5)
    np.testing.assert_allclose(simd_losses, plain_curve(name), rtol=2e-5)
    assert costs == simd_costs


def test_volumes_are_a_function_of_seed_and_number():
    (first, again), others = (volumes.volume(1, 2, 8) for _ in range(2)), volumes.volume(1, 3, 8)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], others[0])
    held_out = volumes.volume(1, 2, 8, held_out=True)
    assert not np.array_equal(first[0], held_out[0])


def test_dice_is_twice_the_common_voxels_over_all():
    found, wanted = np.array([0, 1, 1, 2]), np.array([1, 1, 1, 0])
    assert volumes.dice(found, wanted) == [4 / 5, 0.0]
