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


def stages_of(variables, homes, owner=0):
    forwards = [product] * (len(homes) - 1) + [squares]
    return [
        Stage(f"s{i}", forward, [tf.convert_to_tensor(v)], [], home, places=[owner])
        for i, (forward, v, home) in enumerate(zip(forwards, variables, homes, strict=True))
    ]


def predicted(schedule, homes, owner=0):
    """Times and bytes by source and target, of what pairs of kinds there are."""
    with tf.Graph().as_default():
        stages = stages_of([W] * len(homes), homes, owner)
        return predict_transfers(stages, [tf.constant(X)], schedule)


def sent(schedule, homes, owner, check_numerics="off"):
    """What TensorFlow sends: by source and target the shapes, None for those of variables."""
    variables = []
    for home in homes:
        with tf.device(home.devices[owner]):
            variables.append(tf.Variable(W))
    with tf.device(homes[-1].first):
        seen = tf.Variable(0.0)

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss, _, _ = pipeline_loss(
                stages_of(variables, homes, owner),
                [tf.constant(X)],
                schedule,
                options=Options(check_numerics=check_numerics, loop=False),
            )
        for variable, grad in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(grad)
        seen.assign(loss)

    with record_placement() as graphs:
        run()
    found = collections.defaultdict(list)
    for graph in graphs.partition_graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            # What waits for an operation elsewhere gets a constant from there.
            if node.op == "_Send" and "/ctrl/" not in node.input[0]:
                # Checks say by flags and numbers what they have found.
                if check_numerics != "off" and node.attr["T"].type != tf.float32.as_datatype_enum:
                    continue
                source, target = (
                    f"CPU:{node.attr[f'{end}_device'].s.decode()[-1]}" for end in ("send", "recv")
                )
                made = nodes[node.input[0].split(":")[0]]
                shape = made.attr["shape"].shape if "shape" in made.attr else None
                size = None if shape is None else tuple(dim.size for dim in shape.dim)
                found[source, target].append(size)
    return found


def test_gradients_are_checked_where_they_lie():
    schedule = ScheduleSpec.from_text("1f1b").build(2, 4)
    counts = [
        {pair: len(shapes) for pair, shapes in sent(schedule, HOMES, 1, check).items()}
        for check in ("off", "results")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("name", "owner"), [("1f1b", 0), ("zb_h1", 0), ("zb_h1", 1), ("zb_v", 1)])
def test_what_is_sent_is_what_is_predicted(name, owner):
    schedule = ScheduleSpec.from_text(name).build(2, 4)
    homes = [HOMES[device] for device in schedule.stage_devices]
    of_graph = sent(schedule, homes, owner)
    shapes = {
        "activations": (2, 4),
        "gradients": (2, 4),
        "weight gradients": (4, 4),
        "weights": None,
        "outputs": (),
    }
    # The batch is a constant, of which each device has its copy.
    expected = [t for t in predicted(schedule, homes, owner) if t.what != "inputs"]
    wanted = collections.defaultdict(collections.Counter)
    for transfer in expected:
        shape = shapes[transfer.what]
        wanted[transfer.source, transfer.target][shape] += transfer.times
        elements = np.prod((4, 4) if shape is None else shape, dtype=int)
        assert transfer.bytes == 4 * transfer.times * elements
    assert of_graph.keys() == wanted.keys()
    for pair, counts in wanted.items():
        assert collections.Counter(of_graph[pair]) == counts, pair


def test_the_reduction_over_replicas_happens_once_a_step():
    def sums(num_microbatches):
        found = predicted(one_f_one_b(2, num_microbatches), HOMES)
        return [(t.what, t.times, t.bytes) for t in found if "weight" in t.what]

    assert sums(2) == sums(8) == [("weight gradients", 1, 64)] * 2 + [("weights", 1, 64)] * 2


def test_weights_go_out_from_where_they_lie_and_gradients_come_back_there():
    found = predicted(one_f_one_b(2, 4), HOMES, owner=1)
    ways = {(t.what, t.source, t.target) for t in found if "weight" in t.what}
    assert ways == {
        ("weights", "CPU:1", "CPU:0"),
        ("weights", "CPU:3", "CPU:2"),
        ("weight gradients", "CPU:0", "CPU:1"),
        ("weight gradients", "CPU:2", "CPU:3"),
    }


def test_what_a_device_hands_to_itself_is_not_sent():
    found = predicted(one_f_one_b(2, 4), ["CPU:0", "CPU:0"])
    assert found == []
    table = Schedule(one_f_one_b(2, 4).rows, (0, 1), 4).only_forward()
    assert {t.what for t in predicted(table, ["CPU:0", "CPU:1"])} == {"activations"}
