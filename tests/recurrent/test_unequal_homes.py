"""Stages whose replicas have as many devices each as they need give what the plain model gives."""

import collections
import dataclasses
import time

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import (
    ActionClock,
    Home,
    Options,
    Stage,
    pipeline_loss,
    predict_memory,
    predict_transfers,
)
from pipemesh.recurrent.stage import current_devices
from pipemesh.schedule import forward_only, gpipe, one_f_one_b
from pipemesh.schedule.builders import build
from tests.recurrent import stack
from tests.recurrent.sends import sends, trained
from tests.recurrent.stack import BATCH, IDS, LABELS, LAYERS, STEP, WIDTH, embed, head, layer

# Another number of devices of a replica by the row of the schedule.
CASES = [
    ("tf2", "zb_v", (1, 3, 2), 1, "full", True),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [
            ("tf1", "gpipe", (2, 1), 2, "full", True),
            ("tf2", "1f1b", (1, 2), 2, "none", False),
            ("tf1", "1f1b", (1, 3, 2), 1, "none", True),
            ("tf2", "interleaved:2", (2, 1), 1, "full", False),
            ("tf1", "zb_h1", (1, 2), 1, "full", False),
        ]
    ),
]


def homes(schedule, groups, replicas):
    """Homes of neighbouring devices, one for each row."""
    found, first = [], 0
    for group in groups:
        names = [f"CPU:{first + i}" for i in range(group * replicas)]
        found.append(Home(tuple(names), replicas))
        first += len(names)
    return [found[row] for row in schedule.stage_devices]


def stages(theta, schedule, groups, replicas=1):
    """Layers lie on a stage's devices by turns; slices lie on a replica's first and last one."""
    count = schedule.num_stages
    cuts = [LAYERS * s // count for s in range(count + 1)]
    of_stages = homes(schedule, groups, replicas)

    def make(number):
        layers = range(cuts[number], cuts[number + 1])
        home = of_stages[number]
        own = [t for i in layers for t in (theta["weights"][i], theta["biases"][i])]
        places = [turn % home.group for turn in range(len(layers)) for _ in range(2)]

        def forward(stage_theta, carry, inputs, microbatch, step):
            del microbatch, step
            devices = current_devices()
            *slices, labels = inputs
            h = embed(stage_theta[-1], slices[0]) if number == 0 else tf.concat(slices, -1)
            for turn, index in enumerate(layers):
                with tf.device(devices[turn % len(devices)]):
                    h = layer(index, stage_theta[2 * turn :][:2], h)
            if number == count - 1:
                with tf.device(devices[0]):
                    return head(h, labels), carry
            parts = []
            for part, device in zip(tf.split(h, 2, -1), (devices[0], devices[-1]), strict=True):
                with tf.device(device):
                    parts.append(tf.identity(part))
            return [*parts, labels], carry

        return Stage(
            f"stage{number}",
            forward,
            own + [theta["embedding"]] * (number == 0),
            [],
            home,
            places=places + [0] * (number == 0),
            arrivals=(lambda: [0, home.group - 1, 0]) if number else None,
        )

    return [make(number) for number in range(count)]


def pipelined(theta, schedule, groups, replicas, **options):
    loss, (weights, each), _ = pipeline_loss(
        stages(theta, schedule, groups, replicas),
        [tf.constant(IDS), tf.constant(LABELS)],
        schedule,
        step=tf.constant(STEP, tf.int64),
        options=Options(**options),
    )
    return [loss, tf.reduce_sum(weights), each]


@pytest.mark.parametrize(("mode", "name", "groups", "replicas", "remat", "loop"), CASES)
def test_unequal_homes_equal_the_plain_model(mode, name, groups, replicas, remat, loop):
    schedule = build(name, len(groups), 6 if replicas == 1 and len(groups) == 3 else 2)
    stack.assert_equal(
        mode, lambda theta: pipelined(theta, schedule, groups, replicas, remat=remat, loop=loop)
    )


SLICE = BATCH // 4 * 3 * WIDTH // 2 * 4
LABEL = 2 * SLICE


def predicted(predict, schedule, groups, change=list):
    """What is predicted of stages with weights of zeros."""
    with tf.Graph().as_default():
        theta = {
            "embedding": tf.zeros([7, WIDTH]),
            "weights": [tf.zeros([WIDTH, WIDTH])] * LAYERS,
            "biases": [tf.zeros([WIDTH])] * LAYERS,
        }
        inputs = [tf.constant(IDS), tf.constant(LABELS)]
        made = change(stages(theta, schedule, groups))
        return predict(made, inputs, schedule, step=tf.constant(STEP, tf.int64))


@pytest.mark.parametrize(("groups", "pairs"), [((2, 1), "02 12"), ((1, 2), "01 02")])
def test_slices_and_their_gradients_go_straight(groups, pairs):
    (a, b), (c, d) = pairs.split()
    between = {
        (t.what, t.source[-1] + t.target[-1]): (t.times, t.bytes)
        for t in predicted(predict_transfers, one_f_one_b(2, 4), groups)
        if t.what in ("activations", "gradients")
    }
    # The labels go along with the first slice.
    assert between == {
        ("activations", a + b): (4, 4 * (SLICE + LABEL)),
        ("activations", c + d): (4, 4 * SLICE),
        ("gradients", b + a): (4, 4 * (SLICE + LABEL)),
        ("gradients", d + c): (4, 4 * SLICE),
    }


def test_nothing_else_is_sent_at_the_boundary():
    schedule, made = one_f_one_b(2, 4), []
    predicted(lambda stages, *_, **__: made.extend(stages), schedule, (2, 1))
    run = trained(made, [IDS, LABELS], schedule, step=tf.constant(STEP, tf.int64))
    floats = tf.float32.as_datatype_enum
    counts = collections.Counter((a, b) for _, dtype, a, b in sends(run) if dtype == floats)
    # Of four microbatches a slice each way on each way; the labels go along, their gradients do
    # not, since nobody asks for them.
    assert [counts[pair] for pair in ((0, 2), (1, 2), (2, 0), (2, 1))] == [8, 4, 4, 4]


def wait(x):
    time.sleep(0.03)
    return x


def test_a_device_without_results_does_not_time_an_action():
    """The loss comes of the first device of its home; the second one cannot tell when."""

    def before(theta, carry, inputs, microbatch, step):
        del theta, microbatch, step
        x = tf.ensure_shape(tf.numpy_function(wait, inputs, tf.float32, stateful=False), [2, 3])
        return [x, x], carry

    def last(theta, carry, inputs, microbatch, step):
        del theta, microbatch, step
        with tf.device(current_devices()[1]):
            other = tf.square(inputs[1])
        return [tf.reduce_sum(inputs[0] + other)], carry

    clock, schedule = ActionClock(), forward_only(2, 4)

    @tf.function(autograph=False)
    def run(x):
        made = [
            Stage("before", before, [], [], "CPU:0"),
            Stage("last", last, [], [], Home(("CPU:1", "CPU:2"), 1), arrivals=lambda: [0, 1]),
        ]
        return pipeline_loss(made, [x], schedule, options=Options(clock=clock))[0]

    assert run(tf.ones([8, 3])).numpy() == 48
    timeline = clock.timeline(schedule)
    assert min(timeline.costs.forward) >= 0
    assert [str(span.action) for span in timeline.spans() if span.action.stage] == [
        "1F0", "1F1", "1F2", "1F3",
    ]  # fmt: skip


def test_predicted_memory_is_that_of_each_home():
    memory = predicted(predict_memory, gpipe(2, 4), (2, 1))
    of_layer = (WIDTH * WIDTH + WIDTH) * 4
    assert [device.device for device in memory] == ["CPU:0", "CPU:1", "CPU:2"]
    assert [device.weights for device in memory] == [
        of_layer + 7 * WIDTH * 4,
        of_layer,
        2 * of_layer,
    ]
    # The second stage keeps both slices and the labels of all microbatches, on its one device.
    assert memory[2].kept == 4 * (2 * SLICE + LABEL)


@pytest.mark.parametrize("arrivals", [[0], [0, 1, 2], [0, -1, 0]])
def test_arrivals_are_devices_of_a_replica(arrivals):
    def change(made):
        return [made[0], dataclasses.replace(made[1], arrivals=lambda: arrivals)]

    with pytest.raises(PipelineError, match=r"'stage1' takes 3 tensors .* from 0 to 1"):
        predicted(predict_memory, gpipe(2, 2), (1, 2), change)


def test_by_default_slices_arrive_modulo_the_devices():
    stage = Stage("s", None, [], [], Home(("CPU:0", "CPU:1"), 1))
    assert stage.input_places([0, 1, 2, 3]) == [0, 1, 0, 1]
