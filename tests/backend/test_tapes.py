"""What records computations to differentiate them."""

import pytest
import tensorflow as tf

from pipemesh.backend.tapes import (
    is_recorded,
    is_recorded_twice,
    record_call,
    unrecorded,
    variables_read,
)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_recorded_call_has_the_gradient_that_it_says(in_graph):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with unrecorded():
                y = tf.identity(x) ** 2
            record_call([y], [x], lambda grad: [10 * grad])
        return tape.gradient(y, x)

    assert (tf.function(run) if in_graph else run)(tf.constant(3.0)).numpy() == 10


def test_what_is_computed_unrecorded_has_no_gradient():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with unrecorded():
            y = x**2
    assert tape.gradient(y, x) is None


def test_it_is_known_whether_tapes_record_and_how_often():
    x, other = tf.constant(3.0), tf.constant(4.0)
    assert not is_recorded([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert is_recorded([other, x]) and not is_recorded([other])
        assert not is_recorded_twice([x])
        with tf.GradientTape() as second:
            second.watch(x)
            assert is_recorded_twice([other, x]) and not is_recorded_twice([other])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        assert is_recorded_twice([x])


def test_trainable_variables_that_are_read_are_noted():
    trainable, other = tf.Variable(1.0), tf.Variable(2.0, trainable=False)
    with variables_read() as reads:
        trainable + other
    assert [variable.ref() for variable in reads.watched_variables()] == [trainable.ref()]
