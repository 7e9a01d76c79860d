"""A tensor goes to another placement, and its gradient comes back, as the law of lowerings says."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.lowering.handover import Handover
from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout

SHAPE = Shape.from_text("batch:3;heads:12;length:4")
RULES = LayoutRules.from_text("heads:model;length:sequence")
MESHES = ["model:1", "model:2", "model:3;sequence:1", "model:1;sequence:4", "sequence:2;model:2"]
PAIRS = list(itertools.permutations(MESHES, 2))


def placement(text, first):
    mesh = Mesh.from_text(text)
    rules = tuple(rule for rule in RULES.rules if rule[1] in mesh.axis_names)
    devices = [f"CPU:{(first + i) % 8}" for i in range(mesh.num_devices)]
    return PlacementLowering(mesh, LayoutRules(rules), devices)


def handover(sender, receiver):
    return Handover(*(lowering.tensor_layout(SHAPE) for lowering in (sender, receiver)))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_each_element_goes_over_once(a, b):
    found = handover(placement(a, 0), placement(b, 4))
    held = np.zeros(SHAPE.sizes, int)
    for piece in found.pieces:
        held[tuple(slice(x, x + n) for x, n in zip(piece.begin, piece.size, strict=True))] += 1
    assert (held == 1).all()
    assert sum(math.prod(piece.size) for piece in found.pieces) == SHAPE.size


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_values_and_gradients_are_those_of_one_device(a, b):
    sender, receiver = placement(a, 0), placement(b, 4)
    over = handover(sender, receiver)
    rng = np.random.default_rng(0)
    value, factor = (rng.normal(size=SHAPE.sizes).astype(np.float32) for _ in range(2))

    @tf.function(autograph=False)
    def run(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            x = ops.tanh(ops.import_tensor(sender, value, SHAPE))
            pieces = over.send(x.slices, sender.devices)
            y = Tensor(receiver, over.receive(pieces, receiver.devices), SHAPE)
            y = ops.reduce_sum(y * y * ops.import_tensor(receiver, factor, SHAPE), "heads")
            total = tf.reduce_sum(ops.export_tensor(y))
        return total, tape.gradient(total, value), [piece.device for piece in pieces]

    total, grad, _ = run(value)
    tanh = np.tanh(value)
    np.testing.assert_allclose(total, (tanh**2 * factor).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(grad, 2 * tanh * factor * (1 - tanh**2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("a", "b"), [("model:2", "model:3;sequence:1"), ("model:1", "model:2")])
def test_pieces_and_their_gradients_lie_where_they_are_cut_and_taken(a, b):
    sender, receiver = placement(a, 0), placement(b, 4)
    over = handover(sender, receiver)
    with tf.Graph().as_default():
        x = ops.import_tensor(sender, tf.ones(SHAPE.sizes), SHAPE)
        pieces = over.send(x.slices, sender.devices)
        slices = over.receive(pieces, receiver.devices)
        outputs = [tf.identity(part) for part in ops.tanh(Tensor(receiver, slices, SHAPE)).slices]
        grads = tf.gradients(outputs, pieces)
        at = [int(piece.device[-1]) for piece in pieces]
        assert at == [piece.source for piece in over.pieces]
        # Of the gradients only the operations that cut them; what follows is another action.
        cuts = {op.name: op for op in tf.compat.v1.get_default_graph().get_operations()}
        for grad, piece in zip(grads, over.pieces, strict=True):
            assert int(cuts[grad.op.name].device[-1]) == 4 + piece.target


def test_a_batch_of_another_size_is_joined_as_well():
    sender, receiver = placement("model:2", 0), placement("model:3", 4)
    over = handover(sender, receiver)
    whole = np.arange(5 * 12 * 4, dtype=np.float32).reshape([5, 12, 4])
    pieces = [
        whole[:, piece.begin[1] :, piece.begin[2] :][:, : piece.size[1], : piece.size[2]]
        for piece in over.pieces
    ]
    slices = over.receive([tf.constant(piece) for piece in pieces], receiver.devices)
    np.testing.assert_array_equal(np.concatenate(slices, 1), whole)


def test_integers_and_scalars_go_over_too():
    sender, receiver = placement("model:2", 0), placement("model:1", 4)
    scalar = Handover(*(TensorLayout(Shape(), low.mesh, ()) for low in (sender, receiver)))
    assert len(scalar.pieces) == 1
    x = ops.import_tensor(sender, np.arange(12), "heads:12")
    over = Handover(*(low.tensor_layout(x.shape) for low in (sender, receiver)))
    (found,) = over.receive(over.send(x.slices, sender.devices), receiver.devices)
    np.testing.assert_array_equal(found, np.arange(12))
    (one,) = scalar.receive(scalar.send((tf.constant(7),) * 2, sender.devices), receiver.devices)
    assert one.numpy() == 7
