"""Placement of operations and gradients, and transfers between placements."""

import itertools
import json
import math
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from pipemesh.errors import LayoutError
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.lowering.placement import Handover
from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout
from pipemesh.randomness import plan_free_randomness
from tests.warm import warm

SHAPES = [Shape.from_text(t) for t in ("batch:4;io:6", "io:6;hidden:8", "hidden:8;out:2")]
# Two products forward, and backward two for the weights and one for the hidden layer; nothing on
# the first device, where TensorFlow puts what has no device.
PRODUCTS = {"CPU:1": 5, "CPU:2": 5, "CPU:3": 5, "CPU:4": 5}


def make():
    mesh, rules = Mesh.from_text("data:2;model:2"), LayoutRules.from_text("batch:data;hidden:model")
    return PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(1, 5)])


def arrays():
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape.sizes).astype(np.float32) for shape in SHAPES]


def slices_of(lowering, values):
    layouts = [lowering.tensor_layout(shape) for shape in SHAPES]
    return [
        lowering.import_tensor(value, layout) for value, layout in zip(values, layouts, strict=True)
    ]


def forward(lowering, slices):
    """Two layers, of which the first is split in its columns and the second in its rows."""
    x, w1, w2 = (Tensor(lowering, s, shape) for s, shape in zip(slices, SHAPES, strict=True))
    hidden = ops.relu(ops.einsum([x, w1], ["batch", "hidden"]))
    out = ops.einsum([hidden, w2], ["batch", "out"])
    return ops.reduce_mean(ops.softmax(out, "out") * ops.tanh(out)).slices


def check(lowering, loss, grads):
    x, *weights = map(tf.constant, arrays())
    with tf.GradientTape() as tape:
        tape.watch(weights)
        out = tf.nn.relu(x @ weights[0]) @ weights[1]
        want = tf.reduce_mean(tf.nn.softmax(out) * tf.tanh(out))
    np.testing.assert_allclose(loss[0], want, rtol=1e-5)
    for got, expected, shape in zip(grads, tape.gradient(want, weights), SHAPES[1:], strict=True):
        layout = lowering.tensor_layout(shape)
        for i, part in enumerate(got):
            np.testing.assert_allclose(part, expected[layout.slice_ranges(i)], rtol=1e-4, atol=1e-6)


def products(partition_graphs):
    """How many products of matrices each device computes."""
    count = {}
    for graph in partition_graphs:
        for node in graph.node:
            if "MatMul" in node.op:
                device = re.search(r"CPU:\d", node.device)[0]
                count[device] = count.get(device, 0) + 1
    return count


def test_in_a_tf1_graph_every_slice_is_differentiated_on_its_device():
    with tf.Graph().as_default():
        lowering = make()
        holders = [tf.compat.v1.placeholder(tf.float32, shape.sizes) for shape in SHAPES]
        slices = slices_of(lowering, holders)
        loss = forward(lowering, slices)
        grads = tf.gradients(loss, [*slices[1], *slices[2]])
        metadata = tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session() as session:
            loss, grads = session.run(
                [loss, grads],
                dict(zip(holders, arrays(), strict=True)),
                options=tf.compat.v1.RunOptions(output_partition_graphs=True),
                run_metadata=metadata,
            )
    check(lowering, loss, [grads[:4], grads[4:]])
    assert products(metadata.partition_graphs) == PRODUCTS


def with_gradient(function, slices):
    with tf.GradientTape() as tape:
        tape.watch(slices[1:])
        loss = function(slices)
    return loss, tape.gradient(loss, slices[1:])


@pytest.mark.parametrize("tape", ["inside", "outside"])
def test_in_a_tf_function_every_slice_is_differentiated_on_its_device(tape):
    lowering = make()
    slices = slices_of(lowering, arrays())

    def run(slices):
        return forward(lowering, slices)

    def step():
        if tape == "inside":
            return tf.function(lambda s: with_gradient(run, s), autograph=False)(slices)
        return with_gradient(tf.function(run, autograph=False), slices)

    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # What others left.
    try:
        loss, grads = step()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    check(lowering, loss, grads)
    graphs = [part for graph in metadata.function_graphs for part in graph.partition_graphs]
    # A tape outside of the function makes it differentiate with respect to all that it is given.
    extra = 1 if tape == "outside" else 0
    assert products(graphs) == {device: count + extra for device, count in PRODUCTS.items()}


def device_of(node):
    return re.search(r"CPU:\d", node.device)[0]


@pytest.mark.parametrize("where", ["CPU:0", "CPU:3"])
def test_a_whole_tensor_is_cut_where_it_lies_and_only_slices_are_sent(where):
    lowering = make()
    layout = lowering.tensor_layout(Shape.of(batch=8, io=3))
    with tf.Graph().as_default():
        with tf.device(where):
            whole = tf.compat.v1.placeholder(tf.float32, [8, 3])
        slices = lowering.import_tensor(whole, layout)
        exported = lowering.export_tensor(slices, layout)
        (grad,) = tf.gradients(tf.reduce_sum(tf.square(exported)), whole)
        metadata = tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session() as session:
            value = np.arange(24, dtype=np.float32).reshape(8, 3)
            parts, joined, got = session.run(
                [slices, exported, grad],
                {whole: value},
                options=tf.compat.v1.RunOptions(output_partition_graphs=True),
                run_metadata=metadata,
            )
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, value[layout.slice_ranges(i)])
    np.testing.assert_array_equal(joined, value)
    np.testing.assert_array_equal(got, 2 * value)
    nodes = {node.name: node for graph in metadata.partition_graphs for node in graph.node}
    cuts = [node for node in nodes.values() if node.op == "Slice"]
    # Forward one for each half of the batch, where the tensor lies; backward on the first device.
    forward = [device_of(node) for node in cuts if "gradients" not in node.name]
    assert forward == [where] * 2
    sources = {name for node in nodes.values() if node.op == "_Send" for name in node.input}
    assert not sources & {"Placeholder", "Placeholder:0"}
    # Of 48 bytes a slice, what goes to or comes from the three devices that are not the first.
    assert lowering.costs.transfers == {
        ("import", "forward"): (1, 3 * 48),
        ("export", "forward"): (1, 48),
        ("export", "backward"): (1, 3 * 48),
        ("import", "backward"): (1, 48),
    }
    assert not lowering.costs.rows


def test_an_import_in_a_function_and_eagerly_is_cut_before_it_is_sent():
    lowering = make()
    layout = lowering.tensor_layout(Shape.of(batch=8, io=3))
    value = np.arange(24, dtype=np.float32).reshape(8, 3)
    with tf.device("CPU:3"):
        whole = tf.identity(value)
    for slices in (
        lowering.import_tensor(whole, layout),
        tf.function(lambda x: lowering.import_tensor(x, layout), autograph=False)(whole),
        tf.function(lambda: lowering.import_tensor(whole, layout), autograph=False)(),
    ):
        for i, part in enumerate(slices):
            np.testing.assert_array_equal(part, value[layout.slice_ranges(i)])


@pytest.mark.slow
def test_two_hosts_train_one_network_between_them():
    ended = subprocess.run(
        warm("-m", "tests.lowering.hosts_process"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    short = [device.replace("/replica:0", "") for device in found["placed"]]
    assert short == found["devices"]
    assert max(found["differences"]) < 1e-4
    assert "device '/job:worker/task:2/device:CPU:0' does not exist" in found["missing"]


def test_gpus_of_one_host_reduce_with_nccl():
    with tf.Graph().as_default() as graph:
        mesh, devices = Mesh.from_text("model:2"), ["GPU:0", "GPU:1"]
        lowering = PlacementLowering(mesh, LayoutRules(), devices)
        for op in ("sum", "max", "min"):
            lowering.all_reduce((tf.ones([2]), tf.ones([2])), ["model"], op)
        found = [op for op in graph.get_operations() if op.type == "NcclAllReduce"]
    assert [op.get_attr("reduction") for op in found] == [b"sum"] * 2 + [b"max"] * 2 + [b"min"] * 2
    assert [op.device for op in found] == ["/device:GPU:0", "/device:GPU:1"] * 3


def test_a_tensor_that_is_used_as_two_operands_gets_both_gradients():
    lowering = make()
    slices = slices_of(lowering, arrays())

    @tf.function(autograph=False)
    def run(slices):
        with tf.GradientTape() as tape:
            tape.watch(slices)
            x = Tensor(lowering, slices[0], SHAPES[0])
            y = ops.exp(x)
            loss = ops.reduce_sum(x * y * x)
        return tape.gradient(loss.slices, slices[0])

    x = arrays()[0]
    want = (2 * x + x * x) * np.exp(x)
    for i, part in enumerate(run(slices)):
        held = lowering.tensor_layout(SHAPES[0]).slice_ranges(i)
        np.testing.assert_allclose(part, want[held], rtol=1e-5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: tf.nn.dropout(x, 0.5),
        lambda x: x + tf.random.stateless_normal(x.shape, [1, 2]),
        lambda x: tf.random.shuffle(x),
        tf.function(lambda x: tf.nn.dropout(x, 0.5)),
    ],
)
def test_draws_inside_of_map_would_depend_on_the_layout_and_are_errors(draw):
    draw(tf.ones([4, 6]))
    for text, count in (("data:1", 1), ("data:2", 2)):
        rules = LayoutRules.from_text("batch:data")
        lowering = PlacementLowering(Mesh.from_text(text), rules, ["CPU:0"] * count)
        x = ops.import_tensor(lowering, tf.ones([4, 6]), "batch:4;io:6")
        if count == 1:
            assert lowering.map(draw, x.slices)[0].shape == (4, 6)
            continue
        with pytest.raises(
            LayoutError, match=r"inside of Lowering.map on mesh 'data:2'.*ops\.dropout"
        ):
            lowering.map(draw, x.slices)
    with plan_free_randomness(tf.constant(0, tf.int64)), pytest.raises(LayoutError):
        lowering.map(draw, x.slices)


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
