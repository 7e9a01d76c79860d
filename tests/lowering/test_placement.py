"""Placement of operations and gradients, and transfers between placements."""

import collections
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
PRODUCTS = dict.fromkeys(("CPU:1", "CPU:2", "CPU:3", "CPU:4"), 5)


def make(devices=tuple(PRODUCTS)):
    mesh, rules = Mesh.from_text("data:2;model:2"), LayoutRules.from_text("batch:data;hidden:model")
    return PlacementLowering(mesh, rules, devices)


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


def device_of(node):
    return re.search(r"CPU:\d", node.device)[0]


def products(partition_graphs):
    """Counts the products of matrices on each device."""
    nodes = [node for graph in partition_graphs for node in graph.node]
    return collections.Counter(device_of(node) for node in nodes if "MatMul" in node.op)


def run_tf1(fetches, feeds):
    """The values, and the graphs of all devices."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    with tf.compat.v1.Session() as session:
        found = session.run(fetches, feeds, options=options, run_metadata=metadata)
    return found, metadata.partition_graphs


def test_gradients_lie_on_the_slices_device_in_a_tf1_graph():
    with tf.Graph().as_default():
        lowering = make()
        holders = [tf.compat.v1.placeholder(tf.float32, shape.sizes) for shape in SHAPES]
        slices = slices_of(lowering, holders)
        loss = forward(lowering, slices)
        grads = tf.gradients(loss, [*slices[1], *slices[2]])
        feeds = dict(zip(holders, arrays(), strict=True))
        (loss, grads), graphs = run_tf1([loss, grads], feeds)
    check(lowering, loss, [grads[:4], grads[4:]])
    assert products(graphs) == PRODUCTS


def with_gradient(function, slices):
    with tf.GradientTape() as tape:
        tape.watch(slices[1:])
        loss = function(slices)
    return loss, tape.gradient(loss, slices[1:])


@pytest.mark.parametrize("tape", ["inside", "outside"])
def test_gradients_lie_on_the_slices_device_in_a_tf_function(tape):
    lowering = make()
    slices = slices_of(lowering, arrays())

    def run(slices):
        return forward(lowering, slices)

    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # What others left.
    try:
        if tape == "inside":
            step = tf.function(lambda s: with_gradient(run, s), autograph=False)
            loss, grads = step(slices)
        else:
            loss, grads = with_gradient(tf.function(run, autograph=False), slices)
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    check(lowering, loss, grads)
    graphs = [part for graph in metadata.function_graphs for part in graph.partition_graphs]
    # A tape outside of the function makes it differentiate with respect to all that it is given.
    extra = 1 if tape == "outside" else 0
    assert products(graphs) == {device: count + extra for device, count in PRODUCTS.items()}


@pytest.mark.parametrize("where", ["CPU:0", "CPU:3"])
def test_whole_tensor_is_cut_on_its_own_device(where):
    lowering = make()
    layout = lowering.tensor_layout(Shape.of(batch=8, io=3))
    with tf.Graph().as_default():
        with tf.device(where):
            whole = tf.compat.v1.placeholder(tf.float32, [8, 3])
        slices = lowering.import_tensor(whole, layout)
        exported = lowering.export_tensor(slices, layout)
        (grad,) = tf.gradients(tf.reduce_sum(tf.square(exported)), whole)
        value = np.arange(24, dtype=np.float32).reshape(8, 3)
        (parts, joined, got), graphs = run_tf1([slices, exported, grad], {whole: value})
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, value[layout.slice_ranges(i)])
    np.testing.assert_array_equal(joined, value)
    np.testing.assert_array_equal(got, 2 * value)
    nodes = [node for graph in graphs for node in graph.node]
    cuts = [n for n in nodes if n.op == "Slice" and "gradients" not in n.name]
    # Forward one for each half of the batch, where the tensor lies.
    assert [device_of(node) for node in cuts] == [where] * 2
    sources = {name for node in nodes if node.op == "_Send" for name in node.input}
    assert not sources & {"Placeholder", "Placeholder:0"}
    # Of 48 bytes a slice, what goes to or comes from the three devices that are not the first.
    assert lowering.costs.transfers == {
        ("import", "forward"): (1, 3 * 48),
        ("export", "forward"): (1, 48),
        ("export", "backward"): (1, 3 * 48),
        ("import", "backward"): (1, 48),
    }
    assert not lowering.costs.rows


def test_import_is_cut_before_it_is_sent_in_all_modes():
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


# In a process of its own, because connecting to hosts changes TensorFlow's devices for good.
HOSTS = """
import json, os, socket
import tensorflow as tf
from tests.lowering.test_placement import PlacementLowering, arrays, check, forward, make
from tests.lowering.test_placement import slices_of, with_gradient
sockets = [socket.socket() for _ in range(2)]
for each in sockets:
    each.bind(("localhost", 0))
cluster = {"worker": [f"localhost:{each.getsockname()[1]}" for each in sockets]}
for each in sockets:
    each.close()
config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
servers = [tf.distribute.Server(cluster, "worker", task, config=config) for task in (0, 1)]
tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(cluster))
lowering = make([f"/job:worker/task:{task}/device:CPU:{i}" for task in (0, 1) for i in (0, 1)])
slices = slices_of(lowering, arrays())
loss, grads = tf.function(
    lambda s: with_gradient(lambda s: forward(lowering, s), s), autograph=False
)(slices)
check(lowering, loss, grads)
print(json.dumps([part.device for part in slices[1]]), flush=True)
# Without a farewell to the servers.
os._exit(0)
"""


@pytest.mark.slow
def test_two_hosts_train_one_network_between_them():
    done = subprocess.run(warm("-c", HOSTS), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    placed = [device.replace("/replica:0", "") for device in json.loads(done.stdout)]
    assert placed == [f"/job:worker/task:{t}/device:CPU:{i}" for t in (0, 1) for i in (0, 1)]


def test_gpus_of_one_host_reduce_with_nccl():
    with tf.Graph().as_default() as graph:
        mesh, devices = Mesh.from_text("model:2"), ["GPU:0", "GPU:1"]
        lowering = PlacementLowering(mesh, LayoutRules(), devices)
        for op in ("sum", "max", "min"):
            lowering.all_reduce((tf.ones([2]), tf.ones([2])), ["model"], op)
        found = [op for op in graph.get_operations() if op.type == "NcclAllReduce"]
    assert [op.get_attr("reduction") for op in found] == [b"sum"] * 2 + [b"max"] * 2 + [b"min"] * 2
    assert [op.device for op in found] == ["/device:GPU:0", "/device:GPU:1"] * 3


def test_tensor_used_as_two_operands_gets_both_gradients():
    lowering, x = make(), arrays()[0]

    @tf.function(autograph=False)
    def run(array):
        with tf.GradientTape() as tape:
            tape.watch(array)
            named = ops.import_tensor(lowering, array, SHAPES[0])
            loss = ops.export_tensor(ops.reduce_sum(named * ops.exp(named) * named))
        return tape.gradient(loss, array)

    np.testing.assert_allclose(run(x), (2 * x + x * x) * np.exp(x), rtol=1e-5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: tf.nn.dropout(x, 0.5),
        lambda x: x + tf.random.stateless_normal(x.shape, [1, 2]),
        lambda x: tf.random.shuffle(x),
        tf.function(lambda x: tf.nn.dropout(x, 0.5)),
    ],
)
def test_draws_inside_of_map_are_errors(draw):
    one, lowering = (
        PlacementLowering(Mesh.from_text(f"data:{n}"), LayoutRules(), ["CPU:0"] * n) for n in (1, 2)
    )
    x = ops.import_tensor(lowering, tf.ones([4, 6]), "batch:4;io:6")
    assert one.map(draw, x.slices[:1])[0].shape == (4, 6)
    with pytest.raises(LayoutError, match=r"Lowering.map on mesh 'data:2'.*ops\.dropout"):
        lowering.map(draw, x.slices)
    with plan_free_randomness(tf.constant(0, tf.int64)), pytest.raises(LayoutError):
        lowering.map(draw, x.slices)


SHAPE = Shape.from_text("batch:3;heads:12;length:4")
RULES = LayoutRules.from_text("heads:model;length:sequence")
MESHES = ["model:1", "model:2", "model:3;sequence:1", "model:1;sequence:4", "sequence:2;model:2"]
PAIRS = list(itertools.permutations(MESHES, 2))
# Each mesh sends and receives once.
ROUND = list(zip(MESHES, MESHES[1:] + MESHES[:1], strict=True))


def placement(text, first):
    mesh = Mesh.from_text(text)
    rules = tuple(rule for rule in RULES.rules if rule[1] in mesh.axis_names)
    devices = [f"CPU:{(first + i) % 8}" for i in range(mesh.num_devices)]
    return PlacementLowering(mesh, LayoutRules(rules), devices)


def handover(sender, receiver):
    return Handover(*(lowering.tensor_layout(SHAPE) for lowering in (sender, receiver)))


@pytest.mark.parametrize(
    ("a", "b"),
    [pytest.param(*pair, marks=() if pair in ROUND else pytest.mark.exhaustive) for pair in PAIRS],
)
def test_values_and_gradients_are_those_of_one_device(a, b):
    sender, receiver = placement(a, 0), placement(b, 4)
    over = handover(sender, receiver)
    # Each element goes over once.
    assert sum(math.prod(piece.size) for piece in over.pieces) == SHAPE.size
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
        return total, tape.gradient(total, value)

    total, grad = run(value)
    tanh = np.tanh(value)
    np.testing.assert_allclose(total, (tanh**2 * factor).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(grad, 2 * tanh * factor * (1 - tanh**2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("a", "b"), ROUND[:2])
def test_pieces_and_their_gradients_lie_on_their_devices(a, b):
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
