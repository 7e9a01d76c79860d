"""One action at a time, on the device of its stage, in the order of its home."""

import collections
import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.recurrent import Home, Options, Stage, pipeline, predict_memory, predict_transfers
from pipemesh.recurrent.table.machine import State
from pipemesh.schedule import ScheduleSpec, gpipe
from tests.recurrent.sends import sent_by, trained

HOMES = [Home(("CPU:0", "CPU:1")), Home(("CPU:2", "CPU:3"))]
INPUTS = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
W = [np.random.default_rng(i).normal(size=[4, 4]).astype(np.float32) for i in (1, 2)]
MICROBATCHES = 4


def test_operations_of_another_graph_are_waited_for_by_none():
    with tf.Graph().as_default():
        before = tf.no_op()
    with tf.Graph().as_default():
        state = State.before([Stage("a", None, [], [], HOMES[0])] * 2, [0, 1])
        here = tf.no_op()
        state.tokens = [[[before, here], [before]], [[], [here]]]
        state.forget_tokens_of_other_graphs()
        assert state.tokens == [[[here], []], [[], [here]]]


def product(theta, carry, inputs, microbatch, step):
    return [tf.tanh(tf.matmul(inputs[0], tf.concat(theta, 0)))], []


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(product(theta, carry, inputs, microbatch, step)[0][0] ** 2)], []


def stages_of(slices, homes=HOMES):
    return [
        Stage(
            f"s{i}",
            squares if i == len(slices) - 1 else product,
            [tf.convert_to_tensor(t) for t in own],
            [],
            home,
            places=[0, 1],
            fetched=frozenset({0, 1}),
        )
        for i, (own, home) in enumerate(zip(slices, homes, strict=True))
    ]


def predicted(predict, schedule, stages, **options):
    with tf.Graph().as_default():
        return predict(stages(), [tf.constant(INPUTS)], schedule, options=Options(**options))


def slices(number):
    return [np.split(W[i % 2], 2) for i in range(number)]


def kept(graphs):
    """The joined weights that a graph returns, so that they exist until its caller is done."""
    found = []
    for graph in graphs.partition_graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op == "_Retval":
                while node.op in ("_Retval", "Identity"):
                    node = nodes[node.input[0].split(":")[0]]
                if re.search(r"stage\.s\d/.*concat", node.name):
                    found.append(node.name)
    return found


# Their results: `tests/layers/pipeline/test_zero3.py`.
@pytest.mark.parametrize(
    ("name", "remat", "options", "fetches"),
    [
        # A stage that is alone on its devices fetches once a step.
        ("1f1b", "full", {}, [1, 1]),
        ("zb_h1", "none", {}, [1, 1]),
        ("1f1b", "full", {"loop": True}, [1, 1]),
        # Else each action fetches. The first stage has no gradient of its inputs, which alone would
        # need its weights, but it computes its outputs again.
        ("zb_v", "full", {}, [2 * MICROBATCHES] * 4),
        ("interleaved:2", "none", {}, [MICROBATCHES, *[2 * MICROBATCHES] * 3]),
        # XLA is not asked for gradients of inputs that nobody takes.
        ("interleaved:2", "none", {"compile": True}, [MICROBATCHES, *[2 * MICROBATCHES] * 3]),
    ],
)
def test_fetched_weights_are_sent_once_a_step_if_alone(name, remat, options, fetches):
    """A slice is sent as often as forecast, its gradient once a step, and no result keeps it."""
    schedule = ScheduleSpec.from_text(name).build(2, MICROBATCHES)
    homes, loop = [HOMES[place] for place in schedule.stage_devices], options.get("loop")

    def stages():
        return stages_of(slices(len(homes)), homes)

    run = trained(stages(), [INPUTS], schedule, remat=remat, **options)
    with record_placement() as graphs:
        run()
    found = predicted(predict_transfers, schedule, stages, remat=remat)
    wanted = collections.Counter()
    for transfer in found:
        if transfer.what != "inputs":
            wanted[transfer.source, transfer.target] += transfer.times
    sent = [
        (f"CPU:{source}", f"CPU:{target}")
        for node, _, source, target in sent_by(graphs)
        # A loop also sends from tick to tick.
        if not loop or node.op == "ReadVariableOp"
    ]
    if loop:
        wanted = {(t.source, t.target): t.times for t in found if t.what == "weights"}
    assert collections.Counter(sent) == wanted
    assert not kept(graphs)
    of_weights = {(t.source, t.target): t for t in found if t.what == "weights"}
    for home, (one, other) in enumerate(each.devices for each in HOMES):
        times = sum(n for n, at in zip(fetches, schedule.stage_devices, strict=True) if at == home)
        for pair in ((one, other), (other, one)):
            transfer = of_weights.pop(pair)
            assert (transfer.times, transfer.bytes) == (times, times * W[0].nbytes // 2)
    assert not of_weights
    memory = predicted(predict_memory, schedule, stages, remat=remat)
    number = len(homes) // 2
    is_alone = number == 1
    assert [device.weights for device in memory] == [number * W[0].nbytes // 2] * 4
    assert [device.fetched for device in memory] == [is_alone * W[0].nbytes] * 4
    # Each replica sums up what its rows give, for all of the weight.
    assert [device.gradients for device in memory] == [number * W[0].nbytes] * 4
    sums = [(t.times, t.bytes) for t in found if t.what == "weight gradients"]
    assert sums == [(number, number * W[0].nbytes // 2)] * 4


@pytest.mark.parametrize("loop", [False, True])
def test_a_second_graph_fetches_again(loop):
    """Else the graph of a gradient would make weights a result of the graph before it."""

    @tf.function(autograph=False)
    def forward(x, *weights):
        stages = stages_of([weights[:2], weights[2:]])
        stages = [*stages[:-1], dataclasses.replace(stages[-1], forward=product)]
        return pipeline(stages, [x], gpipe(2, MICROBATCHES), options=Options(loop=loop))[0][0]

    def plain(x, *weights):
        return product(
            [tf.concat(weights[2:], 0)],
            [],
            product([tf.concat(weights[:2], 0)], [], [x], 0, None)[0],
            0,
            None,
        )[0][0]

    weights = [tf.constant(part) for parts in slices(2) for part in parts]
    grads = []
    with record_placement() as graphs:
        for run in (forward, plain):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                y = run(tf.constant(INPUTS), *weights)
            grads.append(tape.gradient(y, weights))
    for one, other in zip(*grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    joined = [
        node.name
        for graph in graphs.partition_graphs
        for node in graph.node
        if node.op == "ConcatV2" and node.name.startswith("stage.")
    ]
    assert len(joined) == 2 * 2 * 2 and not kept(graphs)
