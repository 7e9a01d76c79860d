"""The body of the loop: what is due is computed once, and what is made finds its user."""

import numpy as np
import tensorflow as tf

from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.recurrent.watch.placement import record_placement
from pipemesh.schedule import interleaved_one_f_one_b, looped_bfs, one_f_one_b


def traced(schedule, count=None, **options):
    """A step of stages that multiply, and notes what they compute."""

    @tf.function(autograph=False)
    def step(x, weights):
        def make(number):
            def forward(theta, carry, inputs, microbatch, step):
                y = inputs[0] * theta[0]
                if count is not None:
                    y = tf.numpy_function(
                        lambda x, m: count.append((number, int(m))) or x,
                        [y, microbatch],
                        tf.float32,
                        stateful=False,
                    )
                    y.set_shape(inputs[0].shape)
                last = number == schedule.num_stages - 1
                return [tf.reduce_sum(y) if last else y], []

            device = f"CPU:{schedule.stage_devices[number]}"
            return Stage(f"s{number}", forward, [weights[number]], [], device)

        with tf.GradientTape() as tape:
            tape.watch(weights)
            stages = [make(number) for number in range(schedule.num_stages)]
            options_ = Options(rolled="ticks", **options)
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=options_)
        return loss if count is not None else tape.gradient(loss, weights)

    return step


def test_each_action_is_computed_once_and_nothing_besides():
    count = []
    schedule = one_f_one_b(3, 5)
    weights = [tf.constant(2.0)] * 3
    loss = traced(schedule, count)(tf.range(5.0), weights)
    assert float(loss) == 8 * 10
    assert sorted(count) == [(stage, m) for stage in range(3) for m in range(5)]


def test_values_wait_in_registers_or_in_lists():
    """Many that wait at once (looped_bfs), a few (interleaved)."""
    for schedule in (looped_bfs(3, 9), interleaved_one_f_one_b(4, 8)):
        count = schedule.num_microbatches
        weights = [tf.constant(1.0 + 0.1 * i) for i in range(schedule.num_stages)]
        grads = traced(schedule, remat="none")(tf.range(float(count)), weights)
        product = np.prod(weights)
        wanted = [product / w * count * (count - 1) / 2 for w in weights]
        np.testing.assert_allclose(grads, wanted, rtol=1e-5)


def test_each_home_sends_to_its_neighbours_alone():
    """But for the loop itself, which the first device steers."""
    schedule = one_f_one_b(4, 8)
    step = traced(schedule)
    with record_placement() as graphs:
        step(tf.range(8.0), [tf.constant(1.0)] * 4)
    ways = {
        (node.attr["send_device"].s[-5:], node.attr["recv_device"].s[-5:])
        for graph in graphs.partition_graphs
        for node in graph.node
        if node.op == "_Send" and b"action_" in node.attr["tensor_name"].s
    }
    neighbours = {(b"CPU:%d" % i, b"CPU:%d" % j) for i in range(4) for j in (i - 1, i + 1)}
    assert ways and ways <= neighbours
