"""Steps of an optimizer on weights that are cut into slices, in a TF1 graph and eagerly."""

import contextlib
import itertools

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.saved_state import Slice, mark_slice

NAME = "layer/w/var"


def grid(sizes, cuts):
    """Where slices begin, and how large they are."""
    lengths = [size // cut for size, cut in zip(sizes, cuts, strict=True)]
    begins = itertools.product(*(range(0, s, n) for s, n in zip(sizes, lengths, strict=True)))
    return [(begin, lengths) for begin in begins]


def part_of(whole, begin, lengths):
    return whole[tuple(slice(b, b + n) for b, n in zip(begin, lengths, strict=True))]


def make(value, cuts):
    """A variable, or its slices on several devices, with what each one's part is."""
    # As a layer is made, which makes TensorFlow count names below it anew.
    with tf.compat.v1.variable_scope(NAME.partition("/")[0]):
        parts = grid(value.shape, cuts)
    if len(parts) == 1:
        return [(tf.Variable(value, name=NAME), *parts[0])]
    found = []
    for number, (begin, lengths) in enumerate(parts):
        with tf.device(f"CPU:{number % 3}"):
            name = NAME.replace("/w/", f"/w_slice_{number}/")
            variable = tf.Variable(part_of(value, begin, lengths), name=name)
        mark_slice(variable, NAME, Slice(value.shape, begin))
        found.append((variable, begin, lengths))
    return found


def join(shape, parts, values):
    whole = np.zeros(shape, np.float32)
    for (begin, lengths), value in zip(parts, values, strict=True):
        part_of(whole, begin, lengths)[...] = value
    return whole


@contextlib.contextmanager
def mode(eager):
    """A fresh graph, or lingvo's eager mode."""
    py_utils.SetEagerMode(eager, test_mode=True)
    try:
        if eager:
            yield
        else:
            with tf.Graph().as_default():
                yield
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


def train(params, value, grads, cuts, *, eager, rate=0.1):
    """Applies gradients, one a step.

    Returns:
        The whole weight after each step, and the names and sizes of the optimizer's variables.
    """
    with mode(eager):
        step = py_utils.GetOrCreateGlobalStepVar()
        made = make(value, cuts)
        parts = [(begin, lengths) for _, begin, lengths in made]
        optimizer = params.Instantiate()

        def apply(*slices):
            pairs = zip(made, slices, strict=True)
            var_grad = py_utils.NestedMap(
                {f"v{i}": py_utils.VarGrad(v, grad) for i, ((v, _, _), grad) in enumerate(pairs)}
            )
            update = optimizer.Apply((lambda: tf.constant(rate)) if eager else rate, var_grad)
            with tf.control_dependencies([] if eager else [update]):
                return step.assign_add(1)

        found = []
        slices_of = [[part_of(grad, *part) for part in parts] for grad in grads]
        if eager:
            step.assign(0)
            function = tf.function(apply, autograph=False)
            for slices in slices_of:
                function(*map(tf.constant, slices))
                found.append(join(value.shape, parts, [v.numpy() for v, _, _ in made]))
        else:
            feeds = [tf.compat.v1.placeholder(tf.float32, lengths) for _, lengths in parts]
            update = apply(*feeds)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for slices in slices_of:
                    session.run(update, dict(zip(feeds, slices, strict=True)))
                    found.append(join(value.shape, parts, session.run([v for v, _, _ in made])))
        # One that hands gradients on has none of its own.
        own = optimizer._optimizer.variables() if optimizer._optimizer else []
        return found, {v.name: v.shape.as_list() for v in own}
