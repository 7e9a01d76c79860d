"""The time axis of drawings."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule.render.axis import number, scale_for, ticks


@given(st.floats(1e-6, 1e9), st.integers(1, 30))
def test_axis_ticks_are_few_round_and_within_the_end(end, at_most):
    marks = ticks(end, at_most)
    assert marks[0] == 0
    assert len(marks) <= at_most + 1
    assert marks[-1] <= end * (1 + 1e-6)
    if len(marks) > 1:
        step = marks[1]
        assert marks == pytest.approx([step * index for index in range(len(marks))])
        assert marks[-1] + step > end
        power = 10.0 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(step / power - factor) for factor in (1, 2, 5)) < 1e-6


def test_what_takes_no_time_has_one_tick():
    assert ticks(0.0, 5) == [0.0]


CELL = st.tuples(st.integers(1, 30), st.integers(0, 8))


@given(st.lists(CELL, max_size=8), st.sampled_from([0, 0.0625, 0.25, 0.5]))
def test_the_scale_is_the_least_at_which_few_cells_have_no_room(cells, negligible):
    most = negligible * sum(time for _, time in cells)
    enough = [
        scale
        for scale in sorted(room / time for room, time in cells if time)
        if sum(time for room, time in cells if time and room / time > scale) <= most
    ]
    assert scale_for(iter(cells), negligible) == (enough[0] if enough else 0)


@given(st.floats(-1e12, 1e12))
def test_numbers_keep_four_digits_and_no_zeros_behind_the_point(value):
    text = number(value)
    assert float(text) == pytest.approx(value, rel=5.01e-4)
    mantissa = text.partition("e")[0]
    assert "." not in mantissa or not mantissa.endswith("0")
    if abs(value) < 999:
        assert len(mantissa.strip("-").lstrip("0.").replace(".", "")) <= 4
