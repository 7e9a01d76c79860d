"""Builders by name: each is valid over a wide range, and says what it demands."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    decode,
    forward_only,
    interleaved_one_f_one_b,
    looped_bfs,
    validate,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
virtual = st.integers(1, 4)


@given(st.sampled_from(sorted(BUILDERS)), devices, microbatches, virtual)
def test_valid_or_a_clear_demand(name, num_devices, num_microbatches, num_virtual_stages):
    takes = BUILDERS[name].takes_virtual_stages
    try:
        schedule = build(name, num_devices, num_microbatches, num_virtual_stages if takes else None)
    except ScheduleError as error:
        assert name in ("interleaved_one_f_one_b", "dual_pipe_v")
        assert "num_microbatches" in str(error)
        return
    validate(schedule)
    assert schedule.num_devices == num_devices
    assert schedule.num_microbatches == num_microbatches
    per_device = [schedule.stage_devices.count(d) for d in range(num_devices)]
    expected = num_virtual_stages if takes else BUILDERS[name].virtual_stages
    assert per_device == [expected] * num_devices


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 1), "num_devices is 0; it must be at least 1"),
        ((1, 0), "num_microbatches is 0; it must be at least 1"),
        ((-3, 2), "num_devices is -3"),
        ((2.5, 2), "num_devices is 2.5; it must be an integer"),
        (("2", 2), "num_devices is '2'; it must be an integer"),
    ],
)
def test_bad_counts_are_errors(name, counts, message):
    with pytest.raises(ScheduleError, match=message):
        BUILDERS[name].function(*counts)


@pytest.mark.parametrize("builder", [interleaved_one_f_one_b, looped_bfs, forward_only, decode])
def test_no_virtual_stages_is_an_error(builder):
    with pytest.raises(ScheduleError, match="num_virtual_stages is 0"):
        builder(2, 2, 0)


def test_build_by_name():
    assert build("looped_bfs", 2, 2, 3) == looped_bfs(2, 2, 3)
    assert build("zb_v", 2, 4, 2) == zb_v(2, 4)
    with pytest.raises(ScheduleError, match="did you mean 'one_f_one_b'"):
        build("one-f-one-C", 2, 2)
    with pytest.raises(ScheduleError, match="zb_h1 has always 1 a device"):
        build("zb_h1", 2, 2, 2)


@pytest.mark.parametrize("name", BUILDERS)
def test_signatures_can_be_relied_on(name):
    builder = BUILDERS[name]
    parameters = list(inspect.signature(builder.function).parameters)
    expected = ["num_devices", "num_microbatches", "num_virtual_stages"]
    assert parameters == expected[: 3 if builder.takes_virtual_stages else 2]
    assert builder.function.__name__ == name
    assert "Source:" in builder.function.__doc__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file:x.csv", "use ScheduleSpec.from_text"),
        ("list_schedule", r"use list_schedule\(costs\)"),
    ],
)
def test_what_counts_alone_do_not_say_is_not_built(name, message):
    with pytest.raises(ScheduleError, match=f"'{name}' is not built from counts alone; {message}"):
        build(name, 2, 4)
