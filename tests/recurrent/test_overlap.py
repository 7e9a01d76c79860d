"""Stages really compute at the same time, each one action at a time, in the table's order."""

import itertools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import (
    Options,
    StackedRecurrent,
    Stage,
    current_slice,
    pipeline,
    pipeline_loss,
)
from pipemesh.schedule import Costs, gpipe, seq_one_f_one_b, simulate
from tests.recurrent.calls import calling, calling_stages

pytestmark = pytest.mark.serial
WAIT = 0.02


class Clock:
    """Notes when which stage computed what."""

    def __init__(self):
        self.lock = threading.Lock()
        self.spans = []

    def wait(self, *action):
        begin = time.perf_counter()
        time.sleep(WAIT)
        with self.lock:
            self.spans.append((begin, time.perf_counter(), *action))

    def seconds(self, run, x):
        """The seconds of the shorter of two later steps; the spans are those of the last one."""
        x = tf.constant(x, tf.float32)
        run(x)
        found = []
        for _ in range(2):
            self.spans.clear()
            begin = time.perf_counter()
            run(x)
            found.append(time.perf_counter() - begin)
        self.spans.sort()
        return min(found)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_waiting_stages_overlap_and_keep_the_order_of_their_rows(remat):
    num_stages, num_microbatches = 4, 8
    clock = Clock()
    weights = [tf.Variable(1.0) for _ in range(num_stages)]
    schedule = gpipe(num_stages, num_microbatches)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            stages = calling_stages(schedule, clock.wait, weights, has_loss=False)
            (y,), _ = pipeline(stages, [x], schedule, options=Options(remat=remat))
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, weights)

    seconds, spans = clock.seconds(run, np.arange(num_microbatches)), clock.spans
    passes = 2 if remat == "none" else 3
    assert len(spans) == passes * num_stages * num_microbatches
    for stage, row in enumerate(schedule.rows):
        mine = [span for span in spans if span[2] == stage]
        for one, two in itertools.pairwise(mine):
            assert one[1] <= two[0], "a device does one thing at a time"
        order = [f"{stage}{kind}{m}" for _, _, _, kind, m in mine]
        first = num_microbatches
        assert order[:first] == [str(a) for a in row[:first]]
        assert [a for a in order[first:] if "B" in a] == [str(a) for a in row[first:]]
    # Alone, the waits of one device after the other would take num_stages times as long as the
    # longest row; half of that already needs stages that overlap.
    alone = passes * num_stages * num_microbatches * WAIT
    assert seconds < alone / 2


def test_slices_take_as_long_as_their_simulation():
    """The same cells under Seq1F1B, each handing a state to the next slice."""
    schedule = seq_one_f_one_b(4, 4, 4)
    wanted = simulate(schedule, Costs(WAIT, WAIT)).makespan
    clock = Clock()
    weights = [tf.Variable(1.0) for _ in range(4)]

    def stage(number):
        def forward(theta, carry, inputs, microbatch, step):
            piece = current_slice()
            number_of_piece = microbatch * piece.count + piece.index
            x = (inputs[0] + carry[0]) * theta[0]
            y = calling(x, number_of_piece, lambda *action: clock.wait(number, *action))
            return [tf.reduce_sum(y) if number == 3 else y], [0.5 * y]

        return Stage(
            f"s{number}",
            forward,
            [tf.convert_to_tensor(weights[number])],
            [tf.zeros([1, 1])],
            f"CPU:{number}",
            recurrent=True,
            takes_slices=True,
        )

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            stages = [stage(number) for number in range(4)]
            loss = pipeline_loss(stages, [x], schedule, options=Options(remat="none"))[0]
        return tape.gradient(loss, weights)

    seconds, spans = clock.seconds(run, np.arange(16).reshape([4, 4])), clock.spans
    for number, row in enumerate(schedule.by_pieces().rows):
        mine = [span for span in spans if span[2] == number]
        assert [f"{s}{kind}{m}" for _, _, s, kind, m in mine] == [*map(str, row)]
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(mine))
    # Without slices, 1F1B with cells four times as long would take 1.47 of that.
    assert wanted <= seconds < 1.15 * wanted


# Layers that wait for each other would wait in TensorFlow, where no signal ends it.
@pytest.mark.timeout(120, method="thread")
def test_layers_of_a_recurrent_stack_overlap_in_both_passes():
    num_layers, length = 4, 12
    clock = Clock()
    weights = [tf.Variable(0.5) for _ in range(num_layers)]

    def cell(theta, state, inputs):
        x = theta["w"] * (state["m"] + inputs["x"])
        return {"m": calling(x, tf.constant(0), clock.wait)}, ()

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            over_time, _ = StackedRecurrent(
                [f"CPU:{i}" for i in range(num_layers)],
                *(cell, None, lambda state: {"x": state["m"]}, None),
                [{"w": w} for w in weights],
                [{"m": tf.zeros([2])}] * num_layers,
                {"x": x},
            )
            loss = tf.reduce_sum(over_time["x"])
        return tape.gradient(loss, weights)

    seconds = clock.seconds(run, np.ones([length, 2]))
    # Each time step of each layer is computed, computed again, and differentiated.
    assert len(clock.spans) == 3 * num_layers * length
    # (12 + 4 - 1) / (12 * 4) = 0.31 if starting cost nothing. With one chunk it is 0.7, since
    # computing a time step again need not wait for the gradient.
    assert seconds < 0.5 * 3 * num_layers * length * WAIT
