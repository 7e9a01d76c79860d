"""A stage knows its devices, however its home was given."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError, PipelineError
from pipemesh.recurrent import Home, Stage, current_slice, write_slice
from pipemesh.recurrent.stage import calling_for, starting_anew


@pytest.mark.parametrize("names", [["CPU:0", "CPU:1"], ("CPU:0", "CPU:1")])
def test_names_of_devices_are_a_home(names):
    home = Home(("CPU:0", "CPU:1"))
    assert Home(names) == Home.of(names) == Home.of(home) == home
    assert hash(Home(names)) == hash(home)
    assert Home("CPU:0") == Home.of("CPU:0") == Home(("CPU:0",))
    assert Home.of(home) is home


def test_a_home_keeps_the_order_of_its_devices():
    home = Home(("GPU:1", "GPU:0"))
    assert (home.first, len(home), str(home)) == ("GPU:1", 2, "GPU:1, GPU:0")
    assert home != Home(("GPU:0", "GPU:1"))


@pytest.mark.parametrize("devices", [(), ("CPU:0", 1), 5, None])
@pytest.mark.parametrize("make", [Home, Home.of])
def test_a_home_has_devices(make, devices):
    with pytest.raises(DeviceError, match="give names of one or several") as caught:
        make(devices)
    assert repr(devices) in str(caught.value)


def stage(home):
    return Stage("s", lambda *arguments: ([], []), [], [], home)


@pytest.mark.parametrize(
    "home",
    [("CPU:1", "CPU:0"), ["CPU:1", "CPU:0"], Home(("CPU:1", "CPU:0"))],
    ids=["tuple", "list", "home"],
)
def test_a_stage_has_a_home_whatever_names_its_devices(home):
    assert stage(home).home == Home(("CPU:1", "CPU:0"))
    assert stage(home).devices == ("CPU:1", "CPU:0")
    assert stage(home).device == "CPU:1"


def test_one_device_is_a_home_of_one():
    assert stage("CPU:2").home == Home(("CPU:2",))
    assert stage("CPU:2").devices == ("CPU:2",)


def test_by_default_a_stage_is_not_recurrent_and_has_the_dtypes_of_the_pipeline():
    assert stage("CPU:0").recurrent is False
    assert stage("CPU:0").dtypes is None


@pytest.mark.parametrize("fetched", [{2}, {-1, 0}, {1}])
def test_weights_that_are_fetched_are_weights_and_no_copies(fetched):
    with pytest.raises(PipelineError, match=r"stage 's' fetches \[.*of its 2 weights"):
        Stage("s", lambda *_: ([], []), [1.0, 1.0], [], "CPU:0", copies={1: 0}, fetched=fetched)


@pytest.mark.parametrize("home", [(), 3])
def test_a_stage_lies_somewhere(home):
    with pytest.raises(DeviceError, match="give names of one or several"):
        stage(home)


def number(value):
    return tf.constant(value, tf.int64)


def test_outside_of_a_pipeline_sequences_are_whole():
    assert (int(current_slice().index), current_slice().count) == (0, 1)
    with calling_for(number(2), 3):
        assert (int(current_slice().index), current_slice().count) == (2, 3)
    assert current_slice().count == 1


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_slice_is_written_at_its_positions_and_gets_their_gradient(dim):
    past = tf.constant(np.random.default_rng(0).normal(size=[6, 6, 6]))
    shape = [6] * dim + [2] + [6] * (2 - dim)
    new = tf.constant(np.random.default_rng(1).normal(size=shape))
    weights = np.random.default_rng(2).normal(size=[6, 6, 6])
    with calling_for(number(1), 3), tf.GradientTape() as tape:
        tape.watch([past, new])
        written = write_slice(past, new, dim)
        total = tf.reduce_sum(written * weights)
    begin, own, end = np.split(past.numpy(), [2, 4], dim)
    np.testing.assert_array_equal(written, np.concatenate([begin, new.numpy(), end], dim))
    to_past, to_new = tape.gradient(total, [past, new])
    begin, own, end = np.split(weights, [2, 4], dim)
    np.testing.assert_array_equal(to_new, own)
    np.testing.assert_array_equal(to_past, np.concatenate([begin, 0 * own, end], dim))


def test_whole_sequences_take_the_place_of_what_was_there():
    new = tf.ones([4, 2])
    assert write_slice(tf.zeros([4, 2]), new, 0) is new


@pytest.mark.parametrize("shape", [[3, 2], [2], [None, 2], [2, 3]])
def test_what_is_no_slice_is_not_written(shape):
    text = r"written into \(6, 2\) along dim 0; .* which is that of 3 slices"
    with tf.Graph().as_default(), calling_for(number(1), 3):
        new = tf.compat.v1.placeholder(tf.float32, shape)
        with pytest.raises(PipelineError, match=text):
            write_slice(tf.zeros([6, 2]), new, 0)


def test_the_carry_starts_anew_with_each_microbatch():
    def forward(theta, carry, inputs, microbatch, step):
        return inputs, carry

    stage = starting_anew(Stage("s", forward, [], [tf.constant([1.0, 2.0])], "CPU:0"))
    # What was handed on before is nothing to it, be it no number.
    other = tf.constant([np.nan, 5.0])

    def carry(*where):
        with calling_for(*where), tf.GradientTape() as tape:
            tape.watch(other)
            ((found,), _) = stage.forward([], [other], [], None, None)[::-1]
        return found.numpy().tolist(), tape.gradient(found, other).numpy().tolist()

    assert carry(number(0), 2) == ([1, 2], [0, 0])
    assert carry(number(1), 2)[1] == [1, 1]
    assert carry(number(1), 2)[0][1] == 5
    # The whole batch has other rows; only shapes matter there.
    assert carry(number(0), 2, False)[0][1] == 5
