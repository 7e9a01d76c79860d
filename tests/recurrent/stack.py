"""A stack of layers with every kind of gradient, plain and cut into stages with a loss."""

import functools

import numpy as np
import tensorflow as tf

from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import Home, Options, Stage, pipeline_loss
from tests.devices import device_name

BATCH, WIDTH, VOCAB, LAYERS = 12, 4, 7, 4
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, [BATCH, 3])
LABELS = RNG.normal(size=[BATCH, 3, WIDTH]).astype(np.float32)
VALUES = {
    "embedding": RNG.normal(size=[VOCAB, WIDTH]).astype(np.float32),
    "weights": RNG.normal(size=[LAYERS, WIDTH, WIDTH]).astype(np.float32) / 4,
    "biases": RNG.normal(size=[LAYERS, WIDTH]).astype(np.float32) / 2,
}
STEP = 5


def layer(number, theta, x):
    """Two products with one weight, dropout, a residual."""
    with layer_scope(f"layer{number}"):
        weight, bias = theta
        h = tf.nn.dropout(tf.nn.tanh(tf.matmul(x, weight) + bias), rate=0.3)
        return x + tf.matmul(h, weight)


def embed(table, ids):
    with layer_scope("embedding"):
        return tf.gather(table, ids)


def head(x, labels):
    """The summed loss, the weight, and what every example contributes."""
    with layer_scope("head"):
        each = tf.reduce_sum((x - labels) ** 2, axis=[1, 2])
        return [tf.reduce_sum(each), tf.cast(tf.size(each), tf.float32), each]


def plain(theta, dtype=tf.float32):
    theta = tf.nest.map_structure(lambda t: tf.cast(t, dtype), theta)
    with plan_free_randomness(tf.constant(STEP, tf.int64)):
        x = embed(theta["embedding"], tf.constant(IDS))
        for i in range(LAYERS):
            x = layer(i, (theta["weights"][i], theta["biases"][i]), x)
        loss, weight, each = head(x, tf.cast(tf.constant(LABELS), dtype))
    return [tf.cast(loss, tf.float32), weight, each]


def stages(theta, schedule, replicas=1, has_loss=True):
    """As many stages as the schedule has; the first embeds, the last may end in the loss."""
    num_stages = schedule.num_stages
    cuts = [LAYERS * s // num_stages for s in range(num_stages + 1)]

    def make(number):
        layers = range(cuts[number], cuts[number + 1])

        def forward(stage_theta, carry, inputs, microbatch, step):
            h, labels = inputs
            if number == 0:
                h = embed(stage_theta[-1], h)
            for i, index in enumerate(layers):
                h = layer(index, stage_theta[2 * i : 2 * i + 2], h)
            carry = [carry[0] + 1]
            is_end = has_loss and number == num_stages - 1
            return head(h, labels) if is_end else [h, labels], carry

        own = [t for i in layers for t in (theta["weights"][i], theta["biases"][i])]
        first = schedule.stage_devices[number] * replicas
        return Stage(
            f"stage{number}",
            forward,
            own + [theta["embedding"]] * (number == 0),
            [tf.constant(0)],
            Home(tuple(device_name(first + replica) for replica in range(replicas))),
        )

    return [make(s) for s in range(num_stages)]


def pipelined(theta, schedule, replicas=1, **options):
    """Loss, weight and contributions of the pipeline, and each stage's count of microbatches."""
    loss, (weights, each), carries = pipeline_loss(
        stages(theta, schedule, replicas),
        [tf.constant(IDS), tf.constant(LABELS)],
        schedule,
        step=tf.constant(STEP, tf.int64),
        options=Options(**options),
    )
    return [loss, tf.reduce_sum(weights), each, [carry[0] for carry in carries]]


def unstacked(variables):
    return {
        name: v if name == "embedding" else tf.unstack(tf.convert_to_tensor(v))
        for name, v in variables.items()
    }


def run_tf2(build, num_steps=3):
    """Results and gradients of the first step, weights after all of them (plain descent)."""
    variables = {name: tf.Variable(value) for name, value in VALUES.items()}

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss, weight, *rest = build(unstacked(variables))
            mean = loss / weight
        grads = tape.gradient(mean, list(variables.values()))
        grads = [tf.convert_to_tensor(g) for g in grads]
        for variable, grad in zip(variables.values(), grads, strict=True):
            variable.assign_sub(0.02 * grad)
        return [loss, weight, grads, *rest]

    steps = [run() for _ in range(num_steps)]
    return as_numpy([*steps[0], [v.value() for v in variables.values()]])


def run_tf1(build, num_steps=3):
    with tf.Graph().as_default():
        variables = {
            name: tf.compat.v1.get_variable(name, initializer=value)
            for name, value in VALUES.items()
        }
        loss, weight, *rest = build(unstacked(variables))
        grads = tf.compat.v1.gradients(
            loss / weight, list(variables.values()), colocate_gradients_with_ops=True
        )
        grads = [tf.convert_to_tensor(g) for g in grads]
        updates = [
            tf.compat.v1.assign_sub(variable, 0.02 * grad)
            for variable, grad in zip(variables.values(), grads, strict=True)
        ]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            steps = [
                session.run([[loss, weight, grads, *rest], updates])[0] for _ in range(num_steps)
            ]
            return as_numpy([*steps[0], session.run(list(variables.values()))])


RUNNERS = {"tf1": run_tf1, "tf2": run_tf2}


@functools.cache
def expected(mode):
    return RUNNERS[mode](plain)


def assert_equal(mode, build):
    """Compares with the plain stack; returns the counts of microbatches, if there are some."""
    loss, weight, grads, each, *counts, values = RUNNERS[mode](build)
    plain_loss, plain_weight, plain_grads, plain_each, plain_values = expected(mode)
    assert weight == plain_weight
    wanted = [plain_loss, plain_each, *plain_grads, *plain_values]
    for got, want in zip([loss, each, *grads, *values], wanted, strict=True):
        # Sums of floats in another order differ relative to the largest ones.
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6 * max(1, np.abs(want).max()))
    return [int(count) for of_stages in counts for count in of_stages]


def as_numpy(tree):
    return tf.nest.map_structure(np.asarray, tree)
