"""Slices of variables and slots of optimizers in checkpoints."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.saved_state import Slice, SlicedVariable, create_slots, mark_slice, slice_of

VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)
CUTS = {
    "whole": [((0, 0), (4, 6))],
    "columns": [((0, 0), (4, 3)), ((0, 3), (4, 3))],
    "rows": [((i, 0), (1, 6)) for i in range(4)],
    "both": [((i, j), (2, 2)) for i in (0, 2) for j in (0, 2, 4)],
}


def made(cut, value):
    """A variable, or slices of it."""
    parts = [
        (
            tf.Variable(value[tuple(slice(b, b + s) for b, s in zip(begin, sizes, strict=True))]),
            Slice((4, 6), begin),
        )
        for begin, sizes in CUTS[cut]
    ]
    return ([v for v, _ in parts], parts[0][0] if cut == "whole" else SlicedVariable(parts))


@pytest.mark.parametrize("now", CUTS)
@pytest.mark.parametrize("before", CUTS)
def test_every_cut_is_restored_from_every_other(tmp_path, before, now):
    _, saved = made(before, VALUE)
    path = tf.train.Checkpoint(x=saved).write(str(tmp_path / "ckpt"))
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(path).get_tensor("x/.ATTRIBUTES/VARIABLE_VALUE"), VALUE
    )
    variables, target = made(now, np.zeros_like(VALUE))
    status = tf.train.Checkpoint(x=target).read(path)
    status.assert_consumed()
    status.assert_existing_objects_matched()
    for variable, (begin, sizes) in zip(variables, CUTS[now], strict=True):
        wanted = VALUE[tuple(slice(b, b + s) for b, s in zip(begin, sizes, strict=True))]
        np.testing.assert_array_equal(variable, wanted)


def test_a_tensor_of_another_size_is_an_error(tmp_path):
    _, saved = made("whole", VALUE)
    path = tf.train.Checkpoint(x=saved).write(str(tmp_path / "ckpt"))
    part = tf.Variable(tf.zeros([4, 4]))
    with pytest.raises((tf.errors.OpError, ValueError)):
        tf.train.Checkpoint(x=SlicedVariable([(part, Slice((4, 8), (0, 4)))])).read(path)


@pytest.mark.parametrize("eager", [True, False])
def test_a_slice_mark_does_not_keep_its_variable_alive(eager):
    with contextlib.nullcontext() if eager else tf.Graph().as_default():
        part, other = tf.Variable([1.0, 2.0]), tf.Variable([1.0])
        mark_slice(part, "w", Slice((4,), (2,)))
        assert slice_of(part) == ("w", Slice((4,), (2,)))
        assert slice_of(other) is None and slice_of(part.read_value()) is None
    gone = weakref.ref(part)
    del part
    gc.collect()
    assert not eager or gone() is None


def test_slots_exist_before_the_first_gradient():
    train = tf.compat.v1.train
    with tf.Graph().as_default():
        variables = [tf.Variable([1.0, 2.0], name=name) for name in "ab"]
        optimizer = train.MomentumOptimizer(0.1, 0.9)
        create_slots(optimizer, variables[:1])
        (slot,) = optimizer.variables()
        assert optimizer.get_slot(variables[0], "momentum") is slot
        assert slot in tf.compat.v1.global_variables()
        step = optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variables[0])])
        assert optimizer.variables() == [slot], "applying makes no second one"
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            np.testing.assert_array_equal(session.run(slot), [0, 0])
            session.run(step)
            np.testing.assert_array_equal(session.run(slot), [1, 1])
