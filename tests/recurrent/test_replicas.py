"""Stages on several devices, each with rows of its own."""

import functools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.errors import DeviceError, PipelineError
from pipemesh.recurrent import (
    ActionClock,
    Home,
    Options,
    Placement,
    Stage,
    pipeline,
    pipeline_loss,
    predict_memory,
)
from pipemesh.recurrent.table import machine
from pipemesh.schedule import forward_only, gpipe, interleaved_one_f_one_b, one_f_one_b
from tests.devices import device_name
from tests.recurrent import poisoned
from tests.recurrent.sends import sent_by


def product(theta, carry, inputs, microbatch, step):
    return [tf.matmul(inputs[0], theta[0])], []


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(tf.matmul(inputs[0], theta[0]) ** 2)], []


HOMES = [Home((device_name(0), device_name(1))), Home((device_name(2), device_name(3)))]
X = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)
W = np.random.default_rng(1).normal(size=[4, 4]).astype(np.float32)


def trained(schedule, homes=HOMES, x=X, forwards=(product, squares), **options):
    """A function that gives the loss and the gradients of all weights."""
    variables = [tf.Variable(W / (1 + i % 2)) for i in range(len(forwards))]

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            stages = [
                Stage(f"s{i}", forward, [tf.convert_to_tensor(variables[i])], [], homes[i])
                for i, forward in enumerate(forwards)
            ]
            loss, _, _ = pipeline_loss(
                stages, [tf.constant(x)], schedule, options=Options(**options)
            )
        return [loss, *tape.gradient(loss, variables)]

    return run


def checked(theta, carry, inputs, microbatch, step):
    return [tf.debugging.check_numerics(tf.matmul(inputs[0], theta[0]), "product")], []


def placed(num_microbatches, **options):
    """The graphs of a step, once each replica was found on its own device."""
    with record_placement() as graphs:
        trained(one_f_one_b(2, num_microbatches), strict_devices=True, **options)()
    placement = Placement.of(graphs, [home.devices for home in HOMES])
    placement.check()
    for counts in placement.found:
        first, second = counts.values()
        assert abs(first - second) <= 0.2 * first, str(placement)
    return graphs


def test_the_default_checks_run_on_the_devices_of_the_replicas():
    placed(2)


@pytest.mark.parametrize("forward", [product, checked])
def test_replicas_run_on_their_devices_and_meet_once_a_step(forward):
    graphs = placed(4, forwards=(forward, squares), check_numerics="off")
    sent = [(node.name.split("/")[0], a, b) for node, _, a, b in sent_by(graphs)]
    # A copy of the weight goes out, the sum of its gradients and the loss come back.
    assert sorted((a, b) for _, a, b in sent if (a, b) in ((0, 1), (2, 3))) == [(0, 1), (2, 3)]
    back = [name for name, a, b in sent if (a, b) in ((1, 0), (3, 2))]
    assert [name for name in back if "B" in name] == ["action_1B3", "action_0B3"]
    assert "action_0F" not in "".join(name for name, a, b in sent if (a, b) == (1, 0))


@pytest.mark.parametrize("loop", [False, True])
def test_gradients_of_a_stage_are_summed_while_others_compute(monkeypatch, loop):
    """The last backward pass of the first stage waits for the sums of all others."""
    schedule, at_once = interleaved_one_f_one_b(2, 4, 2), machine.sum_in_order
    summed, waits = threading.Event(), list[bool]()
    counts = iter(range(1, schedule.num_stages))

    def counting(parts):
        def count(total):
            if next(counts, None) == schedule.num_stages - 1:
                summed.set()
            return total

        total = at_once(parts)
        counted = tf.numpy_function(count, [total], tf.float32, stateful=False)
        return tf.ensure_shape(counted, total.shape)

    def wait(dy, part):
        # The last microbatch's, of both replicas.
        if part >= 6:
            waits.append(summed.wait(timeout=20))
        return dy

    def waiting(theta, carry, inputs, microbatch, step):
        @tf.custom_gradient
        def behind(x):
            def grad(dy):
                held = tf.numpy_function(wait, [dy, microbatch], tf.float32, stateful=False)
                return tf.ensure_shape(held, dy.shape)

            return tf.identity(x), grad

        return [behind(tf.matmul(inputs[0], theta[0]))], []

    monkeypatch.setattr(machine, "sum_in_order", counting)
    homes = [HOMES[home] for home in schedule.stage_devices]
    trained(schedule, homes, forwards=(waiting, product, product, squares), loop=loop)()
    assert waits == [True, True]


@pytest.mark.parametrize(("use", "loop"), [("variable", True), ("rows", False), ("tensor", False)])
def test_captured_integers_are_read_once_and_copied_once(use, loop):
    numbers = tf.Variable(np.arange(5, dtype=np.int64))

    @tf.function(autograph=False)
    def run():
        outside = numbers + 1 if use == "tensor" else None

        def forward(theta, carry, inputs, microbatch, step):
            if use == "tensor":
                first = outside[1]
            else:
                first = tf.gather(numbers, 2) if use == "rows" else numbers[2]
            return [inputs[0] * tf.cast(first, tf.float32)], []

        options = Options(check_numerics="off", loop=loop)
        x = tf.constant(X)
        y = pipeline([Stage("s", forward, [], [], HOMES[0])], [x], gpipe(1, 4), options=options)[0]
        return y[0], tf.gradients(y, x)[0]

    with record_placement() as graphs:
        y, grad = run()
    np.testing.assert_allclose(y, 2 * X)
    np.testing.assert_allclose(grad, np.full_like(X, 2))
    nodes = [node for graph in graphs.partition_graphs for node in graph.node]
    reads = ("ReadVariableOp", "ResourceGather", "_ReadVariablesOp")
    assert [node.op for node in nodes if node.op in reads] == ["ReadVariableOp"]
    if not loop:
        # What holds the numbers goes to the other device once a step.
        int64 = tf.int64.as_datatype_enum
        sent = [node.attr["T"].type for node in nodes if node.op == "_Send"]
        assert sent.count(int64) == 1


def executed(mode, **options):
    """The nodes, by name, that TensorFlow executes of a pipeline whose first stage checks."""

    def build():
        weights = [tf.constant(W), tf.constant(W / 2)]
        stages = [
            Stage("s0", checked, weights[:1], [], HOMES[0]),
            Stage("s1", squares, weights[1:], [], HOMES[1]),
        ]
        x = tf.ensure_shape(tf.compat.v1.placeholder_with_default(X, None), X.shape)
        options_ = Options(check_numerics="off", **options)
        loss, _, _ = pipeline_loss(stages, [x], one_f_one_b(2, 2), options=options_)
        return [loss, *tf.gradients(loss, weights)]

    if mode == "tf1":
        wanted = tf.compat.v1.RunOptions(output_partition_graphs=True)
        graphs = tf.compat.v1.RunMetadata()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(build(), options=wanted, run_metadata=graphs)
    else:
        with record_placement() as graphs:
            tf.function(build, autograph=False)()
    return {node.name: node for graph in graphs.partition_graphs for node in graph.node}


def ancestors(nodes, name):
    """All that a node waits for, on other devices, too, with control dependencies."""
    sends = {n.attr["tensor_name"].s: n.name for n in nodes.values() if n.op.endswith("Send")}
    found, todo = set(), [name]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        node = nodes[name]
        todo += [source.lstrip("^").split(":")[0] for source in node.input]
        if node.op.endswith("Recv"):
            todo.append(sends[node.attr["tensor_name"].s])
    return found


@pytest.mark.parametrize(("mode", "remat"), [("tf1", "full"), ("tf2", "none")])
def test_no_replica_waits_for_what_another_one_checks(mode, remat):
    nodes = executed(mode, remat=remat)
    checks = {name: node.device[-1] for name, node in nodes.items() if node.op == "CheckNumerics"}
    assert sorted(checks.values()) == ["0"] * 4 + ["1"] * 4
    pairs = {("0", "2"), ("1", "3")}
    waited = 0
    for name, node in nodes.items():
        if name.startswith("action_") and not node.op.endswith(("Send", "Recv")):
            for check in ancestors(nodes, name) & checks.keys():
                waited += 1
                places = {checks[check], node.device[-1]}
                assert any(places <= set(pair) for pair in pairs), (name, check)
    assert waited > 8


@pytest.mark.parametrize(("use", "replicas"), [("captured", 4), ("theta", 2)])
def test_no_gradient_flows_through_what_replicas_hand_on(use, replicas):
    def gradient(num_microbatches, homes):
        weight = tf.Variable(W)

        def first(theta, carry, inputs, microbatch, step):
            given = theta[0] if use == "theta" else tf.convert_to_tensor(weight)
            h = tf.matmul(inputs[0], given) - carry[0]
            return [h], [carry[0] + tf.reduce_mean(h, 0)]

        def last(theta, carry, inputs, microbatch, step):
            return [tf.reduce_sum(inputs[0] ** 2)], []

        @tf.function(autograph=False)
        def run():
            with tf.GradientTape() as tape:
                theta = [tf.convert_to_tensor(weight)] if use == "theta" else []
                stages = [
                    Stage("a", first, theta, [tf.zeros([4])], homes[0]),
                    Stage("b", last, [], [], homes[1]),
                ]
                schedule = one_f_one_b(2, num_microbatches)
                loss = pipeline_loss(stages, [tf.constant(X)], schedule)[0]
            return loss, tape.gradient(loss, weight)

        return run()

    homes = [[f"CPU:{home * replicas + i}" for i in range(replicas)] for home in range(2)]
    found, wanted = gradient(4 // replicas, homes), gradient(4, ["CPU:0", "CPU:1"])
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


explained = functools.partial(poisoned.explained, devices={"s0": HOMES[0]})


def with_one(value, replica):
    """The inputs with a value in microbatch 2 of four; each has an example for each replica."""
    x = X.copy()
    x[2 * 2 + replica] = value
    return x


@pytest.mark.parametrize(("replica", "loop"), [(0, True), (1, False)])
def test_what_is_not_finite_is_found_with_its_replica(replica, loop):
    x = with_one(np.nan, replica)
    found = explained(trained(one_f_one_b(2, 4), x=x, check_numerics="all", loop=loop))
    text = f"stage 's0' (CPU:{replica}), microbatch 2, forward: its output is not finite"
    assert found.startswith(text)


@pytest.mark.serial
def test_an_action_has_the_mean_times_of_its_replicas():
    def wait(part, value):
        time.sleep(0.4 * (part % 2))
        return value

    def forward(theta, carry, inputs, part, step):
        y = tf.numpy_function(wait, [part, inputs[0]], tf.float32, stateful=False)
        return [tf.ensure_shape(y, inputs[0].shape)], []

    clock, schedule = ActionClock(), forward_only(1, 1)

    @tf.function(autograph=False)
    def run(x):
        stage = Stage("a", forward, [], [], HOMES[0])
        return pipeline([stage], [x], schedule, options=Options(clock=clock))[0]

    run(tf.constant(X))
    (span,) = clock.timeline(schedule).spans()
    # The first replica waits for nothing. A busy machine takes longer.
    assert 0.2 <= span.end - span.start < 0.4


def test_a_device_named_twice_holds_both_replicas():
    with tf.Graph().as_default():
        stages = [
            Stage(f"s{i}", forward, [tf.constant(W)], [], home)
            for i, (forward, home) in enumerate(
                [(product, ("CPU:0", "CPU:0")), (squares, ("CPU:1", "CPU:2"))]
            )
        ]
        found = predict_memory(stages, [tf.constant(X)], one_f_one_b(2, 2))
    assert [(m.weights, m.gradients, m.kept) for m in found] == [
        (64, 128, 2 * 2 * 2 * 16),
        *[(64, 64, 2 * 16)] * 2,
    ]


@pytest.mark.parametrize("loop", [False, True])
def test_one_device_may_have_several_replicas(loop):
    homes = [Home(("CPU:0", "CPU:0")), Home(("CPU:1", "CPU:1"))]
    found = trained(one_f_one_b(2, 2), homes, forwards=(checked, squares), loop=loop)()
    wanted = trained(one_f_one_b(2, 4), ["CPU:0", "CPU:1"], forwards=(checked, squares))()
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_strict_devices_wants_each_replica_on_its_own_device():
    def pinned(theta, carry, inputs, microbatch, step):
        with tf.device("CPU:0"):
            return [tf.matmul(inputs[0], theta[0])], []

    text = r"replica\.1/MatMul' .* of stage 's0' is pinned to .*CPU:0, but the stage is on CPU:1"
    with pytest.raises(DeviceError, match=text):
        trained(one_f_one_b(2, 2), forwards=(pinned, squares), strict_devices=True)()


def test_a_nan_gradient_of_the_inputs_names_its_replica():
    @tf.custom_gradient
    def bad_gradient(x):
        return tf.identity(x), lambda dy: tf.where(x == 7.0, np.nan, dy)

    def first(theta, carry, inputs, microbatch, step):
        return [bad_gradient(inputs[0])], []

    @tf.function(autograph=False)
    def run(x):
        stages = [
            Stage("s0", first, [], [], HOMES[0]),
            Stage("s1", squares, [tf.constant(W)], [], HOMES[1]),
        ]
        loss, _, _ = pipeline_loss(stages, [x], one_f_one_b(2, 4))
        return tf.gradients(loss, x)

    found = explained(lambda: run(tf.constant(with_one(7.0, 1))))
    assert found.startswith("stage 's0' (CPU:1), microbatch 2, backward: the gradient of input 0")


def test_an_operation_that_fails_is_explained_with_its_replica():
    x = with_one(np.nan, 1)
    found = explained(trained(one_f_one_b(2, 4), x=x, forwards=(checked, squares)))
    assert found.startswith("stage 's0' (CPU:1), microbatch 2, replica 1, forward: product"), found


def test_texts_tell_a_replicas_part_from_a_microbatch():
    def summed(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(inputs[0], 0, keepdims=True)], []

    @tf.function(autograph=False)
    def run(x, forward):
        return pipeline([Stage("s", forward, [], [], HOMES[0])], [x], gpipe(1, 2))[0][0]

    with pytest.raises(PipelineError, match="the replicas' parts of microbatches have 2 examples"):
        run(tf.constant(X), summed)

    @tf.function(autograph=False)
    def with_whole(x):
        return run(x, lambda theta, carry, inputs, m, step: ([tf.reduce_sum(x, 1)[:2]], []))

    with pytest.raises(PipelineError, match="of which a replica's part of a microbatch has 2"):
        with_whole(tf.constant(X))
