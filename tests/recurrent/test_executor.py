"""The pipelined computation equals the plain one, tensor by tensor, in both execution modes."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import Options, Stage, pipeline
from pipemesh.schedule import forward_only, gpipe, one_f_one_b

BATCH, WIDTH, VOCAB, LAYERS = 8, 6, 11, 2
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, [BATCH, 3])
EMBEDDING = RNG.normal(size=[VOCAB, WIDTH]).astype(np.float32)
WEIGHTS = RNG.normal(size=[LAYERS, WIDTH, WIDTH]).astype(np.float32) / 2
X = RNG.normal(size=[BATCH, 3, WIDTH]).astype(np.float32)


def layer(number, theta, x, ids):
    """Embedding lookup, dropout, a loop and a branch: each has its own kind of gradient."""
    with layer_scope(f"layer{number}"):
        if number == 0:
            x += tf.gather(theta[-1], ids)
        h = tf.matmul(x, theta[number])
        h = tf.nn.dropout(h, rate=0.3)
        _, h = tf.while_loop(
            lambda i, _: i < 2, lambda i, h: (i + 1, tf.nn.tanh(h) + 0.1 * x), (0, h)
        )
        noise = tf.random.stateless_normal([h.shape[0], 1, WIDTH], seed=[number, 3])
        return x + tf.cond(tf.size(ids) > 0, lambda: h * h, lambda: h) + 0.01 * noise


def plain(theta, x, ids, step):
    with plan_free_randomness(step):
        for number in range(LAYERS):
            x = layer(number, theta, x, ids)
    return x


def pipelined(theta, x, ids, step, num_stages, num_microbatches, remat):
    per_stage = LAYERS // num_stages

    def make(number):
        layers = range(number * per_stage, (number + 1) * per_stage)

        def forward(stage_theta, carry, inputs, microbatch, step):
            known = dict(zip(layers, stage_theta, strict=False))
            known[-1] = stage_theta[-1]
            h, ids = inputs
            for i in layers:
                h = layer(i, known, h, ids)
            return [h, ids], [carry[0] + 1, carry[1] + tf.reduce_sum(ids)]

        return Stage(
            f"stage{number}",
            forward,
            [theta[i] for i in layers] + [theta[-1]] * (number == 0),
            [tf.constant(0), tf.constant(0, tf.int64)],
            f"CPU:{number}",
        )

    (y, ids_out), carries = pipeline(
        [make(i) for i in range(num_stages)],
        [x, ids],
        gpipe(num_stages, num_microbatches),
        step=step,
        options=Options(remat=remat),
    )
    return y, ids_out, carries


def as_theta(weights, embedding):
    return {**{i: w for i, w in enumerate(tf.unstack(weights))}, -1: embedding}


def run_tf2(build):
    weights, embedding, x = tf.Variable(WEIGHTS), tf.Variable(EMBEDDING), tf.Variable(X)

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            y, *rest = build(as_theta(weights, embedding), tf.identity(x))
            loss = tf.reduce_sum(tf.sin(y))
        return [y, *tape.gradient(loss, [weights, embedding, x]), *rest]

    return [tf.convert_to_tensor(t).numpy() for t in tf.nest.flatten(run())]


def run_tf1(build):
    with tf.Graph().as_default():
        variables = [
            tf.compat.v1.get_variable(name, initializer=value)
            for name, value in [("w", WEIGHTS), ("e", EMBEDDING), ("x", X)]
        ]
        y, *rest = build(as_theta(variables[0], variables[1]), tf.identity(variables[2]))
        grads = tf.gradients(tf.reduce_sum(tf.sin(y)), variables)
        grads = [tf.convert_to_tensor(g) for g in grads]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            return session.run([y, *grads, *tf.nest.flatten(rest)])


RUNNERS = {"tf1": run_tf1, "tf2": run_tf2}


@functools.cache
def expected(mode):
    def build(theta, x):
        return (plain(theta, x, tf.constant(IDS), tf.constant(5, tf.int64)),)

    return RUNNERS[mode](build)


@pytest.mark.parametrize(
    ("mode", "remat", "num_stages", "num_microbatches"),
    [("tf1", "none", 1, 4), ("tf1", "full", 2, 2), ("tf2", "none", 2, 8), ("tf2", "full", 2, 1)],
)
def test_outputs_and_all_gradients_equal_the_plain_model(mode, num_stages, num_microbatches, remat):
    def build(theta, x):
        ids, step = tf.constant(IDS), tf.constant(5, tf.int64)
        return pipelined(theta, x, ids, step, num_stages, num_microbatches, remat)

    y, grad_w, grad_e, grad_x, ids, *carries = RUNNERS[mode](build)
    for got, want in zip([y, grad_w, grad_e, grad_x], expected(mode), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ids, IDS)
    assert list(carries) == [num_microbatches, IDS.sum()] * num_stages


def scale(theta, carry, inputs, microbatch, step):
    return [inputs[0] * theta[0], *inputs[1:]], []


def scale_stages(num_stages, weights):
    return [Stage(f"s{i}", scale, [weights[i]], [], f"CPU:{i}") for i in range(num_stages)]


def test_gradients_flow_through_a_function_called_eagerly():
    weights = [tf.Variable(2.0), tf.Variable(3.0)]

    @tf.function
    def run(x):
        (y,), _ = pipeline(
            scale_stages(2, [tf.convert_to_tensor(w) for w in weights]), [x], gpipe(2, 4)
        )
        return y

    with tf.GradientTape() as tape:
        x = tf.ones([8])
        tape.watch(x)
        y = run(x)
        loss = tf.reduce_sum(y * y)
    grad_x, *grads = tape.gradient(loss, [x, *weights])
    np.testing.assert_allclose(y, 6 * np.ones(8))
    np.testing.assert_allclose(grad_x, 72 * np.ones(8))
    np.testing.assert_allclose(grads, [8 * 2 * 6 * 3, 8 * 2 * 6 * 2])


def test_two_losses_of_one_pipeline_have_their_own_gradients():
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=2.0)
        (y,), _ = pipeline(scale_stages(1, [tf.identity(w)]), [tf.ones([4])], gpipe(1, 2))
        grads = [tf.gradients(loss, w)[0] for loss in (tf.reduce_sum(y), tf.reduce_sum(y * y))]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(grads) == [4.0, 16.0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schedule": gpipe(2, 3)}, PipelineError, "a batch of 8 does not divide into 3"),
        ({"schedule": gpipe(3, 2)}, ScheduleError, "3 stages, but 2 were given"),
        ({"batch_dim": 1}, PipelineError, "no dim 1"),
        ({"schedule": one_f_one_b(2, 4)}, ScheduleError, "tick 3: 0F2 follows a backward action"),
    ],
)
def test_bad_plans_are_errors_before_anything_runs(change, error, message):
    @tf.function
    def run():
        arguments = {"inputs": [tf.ones([8])], "schedule": gpipe(2, 2), **change}
        inputs, schedule = arguments.pop("inputs"), arguments.pop("schedule")
        stages = scale_stages(2, [tf.constant(1.0)] * 2)
        pipeline(stages, inputs, schedule, options=Options(**arguments))

    with pytest.raises(error, match=message):
        run()


def test_eager_calls_are_errors_that_say_what_to_do():
    with pytest.raises(PipelineError, match=r"inside a tf\.function"):
        pipeline(scale_stages(1, [tf.constant(1.0)]), [tf.ones([2])], gpipe(1, 1))


def test_a_forward_only_schedule_refuses_gradients():
    @tf.function
    def run(x, train):
        weight = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(weight)
            (y,), _ = pipeline(scale_stages(2, [weight] * 2), [x], forward_only(2, 4))
        return tape.gradient(y, weight) if train else y

    np.testing.assert_allclose(run(tf.ones([8]), False), 9 * np.ones(8))
    with pytest.raises(ScheduleError, match="no backward actions"):
        run(tf.ones([8]), True)


@pytest.mark.parametrize(
    ("use_resource", "num_microbatches", "homes"),
    [(True, 1, ["CPU:0"]), (False, 1, ["CPU:0", "CPU:1"]), (True, 4, ["CPU:0", "CPU:1"]),
     (False, 4, ["CPU:0"])],
)  # fmt: skip
def test_constant_ids_passed_through_come_back_in_a_session(use_resource, num_microbatches, homes):
    ids = np.arange(16, dtype=np.int32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.compat.v1.variable_scope("", use_resource=use_resource):
            table = tf.compat.v1.get_variable("table", initializer=tf.ones([16, 4]))

        def look_up(theta, carry, inputs, microbatch, step):
            return [tf.gather(theta[0], inputs[0]), inputs[0]], []

        stage = Stage("s", look_up, [tf.convert_to_tensor(table)], [], homes)
        outputs, _ = pipeline([stage], [tf.constant(ids)], gpipe(1, num_microbatches))
        session.run(table.initializer)
        np.testing.assert_array_equal(session.run(outputs)[1], ids)


def trained_weight(tape_is_persistent, is_inside):
    """The gradients that a tape gives, asked twice if it is persistent."""
    weight = tf.Variable([[3.0]])

    def scale(theta, carry, inputs, microbatch, step):
        return [tf.matmul(inputs[0], theta[0])], []

    def forward():
        stage = Stage("s", scale, [tf.convert_to_tensor(weight)], [], "CPU:0")
        outputs, _ = pipeline([stage], [tf.range(4.0)[:, None]], gpipe(1, 2))
        return tf.reduce_sum(outputs[0] ** 2)

    call = forward if is_inside else tf.function(forward, autograph=False)

    def gradients():
        with tf.GradientTape(persistent=tape_is_persistent) as tape:
            loss = call()
        return [tape.gradient(loss, weight) for _ in range(1 + tape_is_persistent)]

    return (tf.function(gradients, autograph=False) if is_inside else gradients)()


@pytest.mark.parametrize(
    ("is_persistent", "is_inside"), [(False, False), (True, False), (True, True)]
)
def test_a_persistent_tape_gives_its_gradient_twice(is_persistent, is_inside):
    found = trained_weight(is_persistent, is_inside)
    assert [g.numpy().item() for g in found] == [84.0] * (1 + is_persistent)
