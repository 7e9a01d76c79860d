"""A small pipeline whose layers spoil chosen examples, forward or backward, on demand."""

import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.recurrent.watch.explain import explain
from pipemesh.schedule import zb_h1

STAGES, LAYERS, BATCH, WIDTH, MICROBATCHES = 3, 6, 8, 4, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=[BATCH, WIDTH]).astype(np.float32)
WEIGHTS = RNG.normal(size=[LAYERS, WIDTH, WIDTH]).astype(np.float32) / 2


def nothing():
    """For every example, layer and direction whether it is poisoned."""
    return np.zeros([BATCH, LAYERS, 2], bool)


def poison(layer, microbatch, direction):
    where = nothing()
    size = BATCH // MICROBATCHES
    where[microbatch * size, layer, ["forward", "backward"].index(direction)] = True
    return where


def nan(number, x, chosen):
    return tf.where(chosen, tf.fill(x.shape, np.float32(np.nan)), x)


def broken(number, x, chosen):
    """Layer 2 looks up rows that do not exist; others raise an error in Python."""
    if number == 2:
        rows = tf.range(x.shape[0])
        rows = tf.where(tf.reduce_any(chosen), rows + 7, rows)
        return tf.ensure_shape(tf.gather(x, rows), x.shape)

    def check(x, chosen):
        # Others are at work when it fails.
        time.sleep(0.005)
        if chosen.any():
            raise ValueError("the cable\nis loose")
        return x

    return tf.ensure_shape(
        tf.numpy_function(check, [x, chosen], tf.float32, stateful=False), x.shape
    )


def layer(number, weight, x, where, spoil):
    @tf.custom_gradient
    def poisoned(x):
        forward = spoil(number, x, where[:, number, :1])
        return forward, lambda dy: spoil(number, dy, where[:, number, 1:])

    with layer_scope(f"layer{number}"):
        return poisoned(tf.nn.tanh(tf.matmul(x, weight)))


def stages(weights, spoil):
    size = LAYERS // STAGES

    def make(s):
        def forward(theta, carry, inputs, microbatch, step):
            x, where = inputs
            for i in range(size):
                x = layer(s * size + i, theta[i], x, where, spoil)
            if s == STAGES - 1:
                # A metric that is infinite, but nobody's gradient.
                return [tf.reduce_sum(x**2), tf.reduce_sum(x) / 0.0], [carry[0] + 1]
            return [x, where], [carry[0] + 1]

        own = [weights[s * size + i] for i in range(size)]
        return Stage(f"stage{s}", forward, own, [tf.constant(0)], f"CPU:{s}")

    return [make(s) for s in range(STAGES)]


def loss_of(weights, x, where, schedule=None, spoil=nan, **options):
    loss, _, carries = pipeline_loss(
        stages(weights, spoil),
        [x, where],
        schedule or zb_h1(STAGES, MICROBATCHES),
        options=Options(**{"check_numerics": "all", **options}),
    )
    return loss, carries[-1][0]


def explained(run, *args, devices=None):
    """The line that says why a step failed."""
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(*args)
    return str(explain(caught.value, devices))


class Tf2:
    """Trains with Adam in a tf.function."""

    def __init__(self, **options):
        weights = [tf.Variable(w, name=f"w{i}") for i, w in enumerate(WEIGHTS)]
        seen = tf.Variable(0)
        optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
        optimizer._create_slots(weights)
        self._variables = lambda: [*weights, *optimizer.variables(), seen]

        @tf.function(autograph=False)
        def run(where):
            with tf.GradientTape() as tape:
                values = [tf.convert_to_tensor(w) for w in weights]
                loss, count = loss_of(values, tf.constant(X), where, **options)
            grads = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(grads, weights, strict=True))
            seen.assign_add(count)
            return loss

        self._run = run

    def step(self, where):
        return float(self._run(tf.constant(where)))

    def values(self):
        return [v.numpy() for v in self._variables()]


class Tf1:
    """Trains with Adam in a session."""

    def __init__(self, **options):
        with tf.Graph().as_default() as graph:
            weights = [
                tf.compat.v1.get_variable(f"w{i}", initializer=w) for i, w in enumerate(WEIGHTS)
            ]
            seen = tf.compat.v1.get_variable("seen", initializer=0)
            self._where = tf.compat.v1.placeholder(tf.bool, nothing().shape)
            values = [tf.identity(w) for w in weights]
            loss, count = loss_of(values, tf.constant(X), self._where, **options)
            optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
            grads = tf.gradients(loss, weights)
            train = optimizer.apply_gradients(zip(grads, weights, strict=True))
            self._fetches = [loss, train, tf.compat.v1.assign_add(seen, count)]
            self._variables = tf.compat.v1.global_variables()
            self._session = tf.compat.v1.Session(graph=graph)
            self._session.run(tf.compat.v1.global_variables_initializer())

    def step(self, where):
        return float(self._session.run(self._fetches, {self._where: where})[0])

    def values(self):
        return self._session.run(self._variables)


MODES = {"tf1": Tf1, "tf2": Tf2}
