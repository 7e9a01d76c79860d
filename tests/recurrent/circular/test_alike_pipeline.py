"""Stages of any operations in a loop over ticks compute what they compute in a table."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Options, Stage, pipeline
from pipemesh.recurrent.circular import alike_pipeline
from pipemesh.schedule import gpipe, looped_bfs, one_f_one_b

_draw = np.random.default_rng(0)
X = tf.constant(_draw.normal(size=[8, 3]).astype(np.float32))
TIED = tf.Variable(_draw.normal(size=[3]).astype(np.float32))


def dense(name, theta, carry, inputs, microbatch, step):
    with layer_scope(name):
        h = tf.nn.dropout(tf.tanh(inputs[0] @ theta[0] * TIED), rate=0.4)
    return [inputs[0] + h, inputs[1] + 1], []


def weights_of(number):
    draw = np.random.default_rng(1)
    return [tf.Variable(draw.normal(size=[3, 3]).astype(np.float32)) for _ in range(number)]


def stages_of(weights, num_devices, function=dense):
    return [
        Stage(
            f"s{i}",
            functools.partial(function, f"layer{i}"),
            [tf.convert_to_tensor(w)],
            [],
            f"CPU:{i % num_devices}",
        )
        for i, w in enumerate(weights)
    ]


def run(execute, weights, sizes, outside):
    """Outputs, and gradients of the input, of each weight, and of one that is not in theta."""

    @tf.function(autograph=False)
    def forward(x):
        step = tf.constant(3, tf.int64)
        stages = stages_of(weights, sizes[0])
        inputs = [x, tf.range(8)]
        return execute(stages, inputs, looped_bfs(*sizes), step=step)[0]

    def both():
        with tf.GradientTape() as tape:
            tape.watch(X)
            y, count = forward(X)
            loss = tf.reduce_sum(y**2)
        return [y, count, *tape.gradient(loss, [X, *weights, TIED])]

    return both() if outside else tf.function(both, autograph=False)()


# Also the gradient of a function that is called eagerly.
@pytest.mark.parametrize(("sizes", "outside"), [((2, 4, 2), False), ((2, 2, 1), True)])
def test_it_computes_what_the_table_does(sizes, outside):
    weights = weights_of(sizes[0] * sizes[2])
    wanted, got = (run(execute, weights, sizes, outside) for execute in (pipeline, alike_pipeline))
    np.testing.assert_array_equal(got[1], tf.range(8) + len(weights))
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("execute", [pipeline, alike_pipeline])
def test_below_a_stop_gradient_there_is_none(execute):
    """To ask for the gradient of inputs that have none failed where it was to be checked."""

    def stopped(name, theta, carry, inputs, microbatch, step):
        return [tf.stop_gradient(inputs[0]) * theta[0]], []

    weights = [tf.Variable(tf.ones([3])) for _ in range(2)]

    @tf.function(autograph=False)
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,), _ = execute(stages_of(weights, 2, stopped), [x], gpipe(2, 2))
        grads = tape.gradient(y, [x, *weights])
        assert [grad is None for grad in grads] == [True, True, False]
        return grads[2]

    np.testing.assert_allclose(both(X), tf.reduce_sum(X, 0), rtol=1e-5)


def same(theta, carry, inputs, microbatch, step):
    return inputs, carry


def two(*arguments):
    return [Stage("a", *arguments)] * 2


FIT = two(same, [], [], "CPU:0")


@pytest.mark.parametrize(
    ("stages", "schedule", "options", "words"),
    [
        (two(same, [], [tf.zeros([])], "CPU:0"), gpipe(2, 2), {}, "from microbatch to microbatch"),
        (two(same, [], [], ("CPU:0", "CPU:1")), gpipe(2, 2), {}, "has 2 devices"),
        (
            two(lambda *_: ([X[:4, :2]], []), [], [], "CPU:0"),
            gpipe(2, 2),
            {},
            "is given float32",
        ),
        (two(lambda *_: ([], []), [], [], "CPU:0"), gpipe(2, 2), {}, "0 tensors and is given 1"),
        (
            [Stage("a", same, [], [], f"CPU:{i}") for i in range(4)],
            looped_bfs(2, 2, 2),
            {},
            "puts it beside a stage on 'CPU:0'",
        ),
        (FIT, one_f_one_b(2, 2), {}, "use schedule='gpipe'"),
        (FIT, gpipe(2, 2), {"remat": "none"}, "remat is "),
        (FIT, gpipe(2, 2), {"loop": False}, "loop is "),
        (FIT, gpipe(2, 2), {"check_numerics": "forward"}, "check_numerics is "),
    ],
)
def test_what_a_loop_cannot_run_is_an_error(stages, schedule, options, words):
    def build(x):
        return alike_pipeline(stages, [x], schedule, options=Options(**options))[0]

    error = ScheduleError if schedule == one_f_one_b(2, 2) else PipelineError
    with pytest.raises(error, match=words):
        tf.function(build, autograph=False).get_concrete_function(X)


def test_a_stage_is_computed_on_its_device_and_only_when_it_has_work():
    """Zeros, with which the loop begins, would fail the check."""

    def checked(theta, carry, inputs, microbatch, step):
        checks = [tf.debugging.assert_greater(tf.norm(inputs[0]), 0.0)]
        with tf.control_dependencies(checks):
            return [inputs[0] / tf.norm(inputs[0]) * theta[0]], []

    @tf.function(autograph=False)
    def both(x):
        stages = [Stage(f"s{i}", checked, [tf.ones([])], [], f"CPU:{i}") for i in range(2)]
        y = alike_pipeline(stages, [x], gpipe(2, 2))[0][0]
        return y, tf.gradients(y, x)[0]

    assert all(np.isfinite(value).all() for value in both(X))
    library = both.get_concrete_function(X).graph.as_graph_def().library
    choices = [node for one in library.function for node in one.node_def if "Case" in node.op]
    assert sorted(node.device[-1] for node in choices) == ["0", "0", "1", "1"]
