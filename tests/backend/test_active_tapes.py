"""Which tapes record now."""

import threading

import tensorflow as tf

from pipemesh.backend.active_tapes import outermost_tape


def test_the_outermost_tape_is_the_one_that_began_first():
    assert outermost_tape() is None
    with tf.GradientTape() as first:
        with tf.GradientTape():
            assert outermost_tape() is first
        with first.stop_recording():
            assert outermost_tape() is None
        assert outermost_tape() is first
    assert outermost_tape() is None


def test_a_tape_that_failed_records_no_more():
    try:
        with tf.GradientTape():
            raise ValueError
    except ValueError:
        assert outermost_tape() is None


def test_each_thread_has_tapes_of_its_own():
    seen = []
    with tf.GradientTape() as tape:
        thread = threading.Thread(target=lambda: seen.append(outermost_tape()))
        thread.start()
        thread.join()
        assert seen == [None] and outermost_tape() is tape
