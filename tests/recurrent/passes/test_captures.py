"""Weights that a stage reaches otherwise than through its theta, and other tensors from outside."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import Home, Options, Stage, pipeline, pipeline_loss
from pipemesh.schedule import gpipe, one_f_one_b, zb_h1

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 4]).astype(np.float32)


def read(x, weight):
    """A variable read where it is used."""
    return tf.nn.tanh(tf.matmul(x, weight)) + tf.matmul(x, weight)


def computed(x, weight):
    """A tensor that was computed from a variable outside."""
    return tf.nn.tanh(tf.matmul(x, weight))


def looked_up(x, table):
    """Rows of a variable, which have a sparse gradient."""
    ids = tf.cast(x[:, 0] > 0, tf.int32)
    return x + tf.nn.embedding_lookup(table, ids) + tf.gather(table, ids + 1)


def looked_up_by_tuples(x, table):
    """Rows and single elements of a variable."""
    ids = tf.cast(x[:, :1] > 0, tf.int32)
    rows = tf.gather_nd(table, ids + 1)
    return x + rows + tf.gather_nd(table, tf.concat([ids, ids + 2], 1))[:, None]


def in_function(x, weight):
    """A variable that only the body of a function reads."""
    return tf.function(lambda: tf.matmul(x, weight), autograph=False)()


def in_branch(x, weight):
    """A variable that only the body of a branch reads."""
    right = tf.reduce_all(tf.math.is_finite(x))
    return tf.cond(right, lambda: tf.matmul(x, weight), lambda: 2 * x)


def in_loop(x, weight):
    """A loop without a known number of turns, whose backward pass needs lists of any length."""

    def body(i, y):
        return i + 1, tf.nn.tanh(tf.matmul(y, weight))

    return tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]


OUTSIDE = (read, computed, looked_up, looked_up_by_tuples)
INSIDE = (in_branch, in_loop, in_function)
# Each use has a variable.
VALUES = {use.__name__: RNG.normal(size=[4, 4]).astype(np.float32) for use in OUTSIDE + INSIDE}
VALUES["own"] = np.float32(1.5)


def build(uses, weights, schedule, replicas=1, **options):
    """Loss of two stages that both use what they were not given; plain without a schedule."""
    weights = {**weights, "computed": tf.nn.tanh(weights["computed"])}

    def used(x):
        return tf.add_n([use(x, weights[use.__name__]) for use in uses])

    def first(theta, carry, inputs, microbatch, step):
        return [used(inputs[0]) * theta[0]], []

    def last(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(used(inputs[0]) ** 2)], []

    own = [tf.convert_to_tensor(weights["own"])]
    if schedule is None:
        return last([], [], first(own, [], [tf.constant(X)], 0, None)[0], 0, None)[0][0]
    home = 0 if {*uses} & {*INSIDE} else 1
    homes = [Home(tuple(f"CPU:{h + 2 * r}" for r in range(replicas))) for h in (0, home)]
    stages = [Stage("s0", first, own, [], homes[0]), Stage("s1", last, [], [], homes[1])]
    return pipeline_loss(stages, [tf.constant(X)], schedule, options=Options(**options))[0]


def run_tf1(*args, **options):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weights = {
            name: tf.compat.v1.get_variable(name, initializer=value)
            for name, value in VALUES.items()
        }
        loss = build(args[0], weights, *args[1:], **options)
        grads = tf.gradients(loss, list(weights.values()))
        named = dict(zip(weights, grads, strict=True))
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(
            [loss, {n: tf.convert_to_tensor(g) for n, g in named.items() if g is not None}]
        )


def run_tf2(*args, **options):
    weights = {name: tf.Variable(value) for name, value in VALUES.items()}

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = build(args[0], weights, *args[1:], **options)
        grads = tape.gradient(loss, weights)
        return loss, {n: tf.convert_to_tensor(g) for n, g in grads.items() if g is not None}

    return tf.nest.map_structure(lambda t: t.numpy(), step())


@functools.cache
def plain(run, uses):
    return run(uses, None)


@pytest.mark.parametrize("use", INSIDE)
def test_replicas_cannot_read_a_variable_in_an_inner_function(use):
    with pytest.raises(PipelineError, match=r"'s0' has replicas and reads the variable of shape"):
        run_tf2([use], one_f_one_b(2, 2), replicas=2)


@pytest.mark.parametrize(
    ("run", "uses", "schedule", "options"),
    [
        (run_tf1, INSIDE, zb_h1(2, 4), {"loop": True, "remat": "none"}),
        (run_tf2, INSIDE, one_f_one_b(2, 2), {"remat": "except_last"}),
        (run_tf2, OUTSIDE, zb_h1(2, 4), {"remat": "none"}),
        (run_tf1, OUTSIDE, one_f_one_b(2, 2), {"replicas": 2}),
        (run_tf2, OUTSIDE, one_f_one_b(2, 2), {"replicas": 2, "loop": True}),
    ],
)
def test_gradients_of_captured_weights_are_summed(run, uses, schedule, options):
    wanted_loss, wanted = plain(run, uses)
    loss, grads = run(uses, schedule, **options)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_captured_weight_with_the_loss_outside_in_bfloat16():
    weight = tf.Variable(VALUES["read"])

    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(tf.cast(inputs[0], tf.float32), weight)], []

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            stage = Stage("s0", forward, [], [], "CPU:1")
            options = Options(compute_dtype=tf.bfloat16)
            (y,), _ = pipeline([stage], [tf.ones([8, 4])], gpipe(1, 4), options=options)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weight)

    np.testing.assert_allclose(step(), np.full([4, 4], 8.0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32])
def test_a_captured_tensor_with_a_row_per_example_is_an_error(dtype):
    @tf.function(autograph=False)
    def step(mask):
        def forward(theta, carry, inputs, microbatch, step):
            return [inputs[0] * tf.cast(mask, tf.float32)], []

        return pipeline([Stage("s0", forward, [], [], "CPU:0")], [tf.constant(X)], gpipe(1, 8))[0]

    message = r"stage 's0' uses the tensor 'mask:0' of shape \(8, 1\).*as an input of the pipeline"
    with pytest.raises(PipelineError, match=message):
        step(tf.ones([8, 1], dtype))


def test_captured_weights_may_be_as_long_as_the_batch():
    position = tf.Variable(tf.ones([4]))

    @tf.function(autograph=False)
    def step():
        def forward(theta, carry, inputs, microbatch, step):
            return [inputs[0] * tile[:1]], []

        with tf.GradientTape() as tape:
            tile = tf.tile(position[None], [8, 1])
            (y,), _ = pipeline(
                [Stage("s0", forward, [], [], "CPU:0")], [tf.constant(X)], gpipe(1, 8)
            )
            loss = tf.reduce_sum(y)
        return loss, tape.gradient(loss, position)

    loss, grad = step()
    np.testing.assert_allclose(loss, X.sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, X.sum(0), rtol=1e-5)


@pytest.mark.parametrize(("schedule", "loop"), [(one_f_one_b(3, 2), True), (zb_h1(3, 2), False)])
def test_weights_below_a_stopped_gradient_have_none(schedule, loop):
    weights = [tf.Variable(2.0) for _ in range(3)]

    @tf.function(autograph=False)
    def step():
        def make(s):
            def forward(theta, carry, inputs, microbatch, step):
                x, kept = inputs
                x = (tf.stop_gradient(x) if s == 1 else x) * theta[0]
                return [tf.reduce_sum(x)] if s == 2 else [x, kept], []

            return Stage(f"s{s}", forward, [tf.convert_to_tensor(weights[s])], [], f"CPU:{s}")

        with tf.GradientTape() as tape:
            loss, _, _ = pipeline_loss(
                [make(s) for s in range(3)],
                [tf.constant(X), tf.constant(X)],
                schedule,
                options=Options(loop=loop),
            )
        return [g is None for g in tape.gradient(loss, weights)]

    assert step() == [True, False, False]
