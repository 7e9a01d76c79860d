"""What is predicted to go between devices is what TensorFlow sends."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import (
    Home,
    Options,
    Stage,
    pipeline_loss,
    predict_transfers,
    record_placement,
)
from pipemesh.schedule import Schedule, ScheduleSpec, one_f_one_b

HOMES = [Home(("CPU:0", "CPU:1")), Home(("CPU:2", "CPU:3"))]
X = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
W = np.random.default_rng(1).normal(size=[4, 4]).astype(np.float32)


def product(theta, carry, inputs, microbatch, step):
    return [tf.matmul(inputs[0], theta[0])], []


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(tf.matmul(inputs[0], theta[0]) ** 2)], []


def stages_of(variables, homes):
    forwards = [product] * (len(homes) - 1) + [squares]
    return [
        Stage(f"s{i}", forward, [tf.convert_to_tensor(v)], [], home)
        for i, (forward, v, home) in enumerate(zip(forwards, variables, homes, strict=True))
    ]


def predicted(schedule, homes):
    """Times and bytes by source and target, of what pairs of kinds there are."""
    with tf.Graph().as_default():
        stages = stages_of([W] * len(homes), homes)
        return predict_transfers(stages, [tf.constant(X)], schedule)


def sent(schedule, homes):
    """What TensorFlow sends: by source and target the shapes, None for those of variables."""
    variables = [tf.Variable(W) for _ in homes]

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss, _, _ = pipeline_loss(
                stages_of(variables, homes),
                [tf.constant(X)],
                schedule,
                options=Options(check_numerics="off", rolled=False),
            )
        return [loss, *tape.gradient(loss, variables)]

    with record_placement() as graphs:
        run()
    found = collections.defaultdict(list)
    for graph in graphs.partition_graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op == "_Send":
                source, target = (
                    f"CPU:{node.attr[f'{end}_device'].s.decode()[-1]}" for end in ("send", "recv")
                )
                made = nodes[node.input[0].split(":")[0]]
                shape = made.attr["shape"].shape if "shape" in made.attr else None
                size = None if shape is None else tuple(dim.size for dim in shape.dim)
                found[source, target].append(size)
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_what_is_sent_is_what_is_predicted(name):
    schedule = ScheduleSpec.from_text(name).build(2, 4)
    homes = [HOMES[device] for device in schedule.stage_devices]
    of_graph = sent(schedule, homes)
    shapes = {
        "activations": (2, 4),
        "gradients": (2, 4),
        "weight gradients": (4, 4),
        "weights": None,
        "outputs": (),
    }
    # The batch is a constant, of which each device has its copy.
    expected = [t for t in predicted(schedule, homes) if t.what != "inputs"]
    wanted = collections.defaultdict(collections.Counter)
    for transfer in expected:
        shape = shapes[transfer.what]
        wanted[transfer.source, transfer.target][shape] += transfer.times
        elements = np.prod((4, 4) if shape is None else shape, dtype=int)
        assert transfer.bytes == 4 * transfer.times * elements
    assert of_graph.keys() == wanted.keys()
    for pair, counts in wanted.items():
        found = collections.Counter(of_graph[pair])
        if {*pair} not in ({"CPU:0", "CPU:1"}, {"CPU:2", "CPU:3"}):
            # Gradients of variables go back to where these lie.
            del found[None]
        assert found == counts, pair


def test_the_reduction_over_replicas_happens_once_a_step():
    def sums(num_microbatches):
        found = predicted(one_f_one_b(2, num_microbatches), HOMES)
        return [(t.what, t.times, t.bytes) for t in found if "weight" in t.what]

    assert sums(2) == sums(8) == [("weight gradients", 1, 64)] * 2 + [("weights", 1, 64)] * 2


def test_what_a_device_hands_to_itself_is_not_sent():
    found = predicted(one_f_one_b(2, 4), ["CPU:0", "CPU:0"])
    assert found == []
    table = Schedule(one_f_one_b(2, 4).rows, (0, 1), 4).only_forward()
    assert {t.what for t in predicted(table, ["CPU:0", "CPU:1"])} == {"activations"}
