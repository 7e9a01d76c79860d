"""One forward, one backward: bubble and memory as published, over a wide range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, interleaved_one_f_one_b, one_f_one_b, simulate

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
time = st.integers(1, 9)


@given(devices, microbatches, time, time)
def test_one_f_one_b(d, m, f, b):
    timeline = simulate(one_f_one_b(d, m), Costs(f, b))
    assert timeline.makespan == (m + d - 1) * (f + b)
    assert timeline.bubble == ((d - 1) * (f + b),) * d
    assert timeline.peak_activations == tuple(min(m, d - k) for k in range(d))


@given(devices, st.integers(1, 5), st.integers(2, 4), time, time)
def test_interleaved_one_f_one_b(d, groups, v, f, b):
    m = groups * d
    timeline = simulate(interleaved_one_f_one_b(d, m, v), Costs(f, b))
    assert timeline.bubble == ((d - 1) * (f + b),) * d
    assert timeline.peak_activations == tuple(
        min(v * m, 2 * (d - k - 1) + (v - 1) * d + 1) for k in range(d)
    )


@given(devices, st.integers(1, 5), st.integers(1, 4))
def test_interleaving_divides_the_bubble_of_one_model(d, groups, v):
    m, model = groups * d, Costs(forward=1, backward=2)
    plain = simulate(one_f_one_b(d, m), model).bubble
    looped = simulate(interleaved_one_f_one_b(d, m, v), model.refined(v)).bubble
    assert looped == pytest.approx([bubble / v for bubble in plain])


def test_interleaving_demands_a_multiple_and_says_which():
    with pytest.raises(ScheduleError, match="needs a multiple of num_devices, 4; use 4 or 8"):
        interleaved_one_f_one_b(4, 6, 2)
    with pytest.raises(ScheduleError, match="use 4 microbatches"):
        interleaved_one_f_one_b(4, 3, 2)
    assert interleaved_one_f_one_b(4, 6, 1) == one_f_one_b(4, 6)
