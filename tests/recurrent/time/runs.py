"""Ways to run a recurrent network and to compare its results and gradients."""

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

NUM_DEVICES = 3


class Meter:
    """A layer with an accumulator, as lingvo's have them."""

    def __init__(self):
        self.values = {"total": tf.zeros([])}

    def GetAccumulatorValues(self):
        return dict(self.values)

    def SetAccumulatorValues(self, values):
        self.values = dict(values)


def lstm(theta, state, inputs):
    """A cell on lingvo's containers."""
    z = tf.matmul(tf.concat([inputs.x, state.m], axis=1), theta.gates)
    i, f, o, g = tf.split(z, 4, axis=1)
    c = tf.sigmoid(f) * state.c + tf.sigmoid(i) * tf.tanh(g)
    return py_utils.NestedMap(c=c, m=tf.sigmoid(o) * tf.tanh(c)), py_utils.NestedMap()


def loss_of(results):
    """A loss that depends on every number of every floating result, each in its own way."""
    parts = []
    for x in tf.nest.flatten(results):
        if x is not None and x.dtype.is_complex:
            parts.append(tf.reduce_sum(tf.abs(tf.sin(x))))
        elif x is not None and x.dtype.is_floating:
            parts.append(tf.reduce_sum(tf.sin((len(parts) + 1.0) * x)))
    return tf.add_n(parts)


def _dense(grads):
    return {name: g if g is None else tf.convert_to_tensor(g) for name, g in grads.items()}


def run_eagerly(build, values, loss=loss_of):
    variables = {name: tf.Variable(value) for name, value in values.items()}
    with tf.GradientTape() as tape:
        results = build(variables)
        total = loss(results)
    return results, _dense(tape.gradient(total, variables))


def run_tf2(build, values, loss=loss_of, jit_compile=False):
    variables = {name: tf.Variable(value) for name, value in values.items()}

    @tf.function(autograph=False, jit_compile=jit_compile)
    def run():
        with tf.GradientTape() as tape:
            results = build(variables)
            total = loss(results)
        return results, _dense(tape.gradient(total, variables))

    first, second = run(), run()
    tf.nest.map_structure(np.testing.assert_array_equal, first, second)
    return second


def run_tf1(build, values, loss=loss_of):
    with tf.Graph().as_default():
        variables = {
            name: tf.compat.v1.get_variable(name, initializer=tf.constant(value))
            for name, value in values.items()
        }
        results = build(variables)
        grads = tf.gradients(loss(results), list(variables.values()))
        both = results, _dense(dict(zip(variables, grads, strict=True)))
        fetches = [x for x in tf.nest.flatten(both) if x is not None]
        config = tf.compat.v1.ConfigProto(device_count={"CPU": NUM_DEVICES})
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            first, second = session.run(fetches), session.run(fetches)
        tf.nest.map_structure(np.testing.assert_array_equal, first, second)
        found = iter(second)
        return tf.nest.map_structure(lambda x: None if x is None else next(found), both)


def assert_equal(got, want, may_be_zero=False, **tolerance):
    """Compares results and gradients; zeros stand for no gradient if they may."""
    tolerance = {"rtol": 1e-5, "atol": 1e-5, **tolerance}
    tf.nest.assert_same_structure(got[0], want[0])
    for a, b in zip(*(tf.nest.flatten(results) for results in (got[0], want[0])), strict=True):
        if b is None:
            assert a is None
        else:
            np.testing.assert_allclose(a, b, **tolerance)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        if grad is None:
            assert got[1][name] is None or (may_be_zero and not np.any(got[1][name])), name
        else:
            np.testing.assert_allclose(got[1][name], grad, err_msg=name, **tolerance)
