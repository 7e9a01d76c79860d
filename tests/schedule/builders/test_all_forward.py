"""All forwards first: makespan, bubble and memory as published, over a wide range."""

from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule import Costs, decode, forward_only, gpipe, looped_bfs, simulate

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
virtual = st.integers(1, 4)
time = st.integers(1, 9)


@given(devices, microbatches, time, time)
def test_gpipe(d, m, f, b):
    timeline = simulate(gpipe(d, m), Costs(f, b))
    assert timeline.makespan == (m + d - 1) * (f + b)
    assert timeline.bubble == ((d - 1) * (f + b),) * d
    assert timeline.peak_activations == (m,) * d


@given(devices, microbatches, virtual, time, time)
def test_looped_bfs(d, m, v, f, b):
    timeline = simulate(looped_bfs(d, m, v), Costs(f, b))
    long_enough = m >= d or v == 1
    units = v * m + d - 1 if long_enough else v * d + m - 1
    assert timeline.makespan == units * (f + b)
    assert timeline.peak_activations == (v * m,) * d


@given(devices, microbatches, virtual, time)
def test_forward_only(d, m, v, f):
    timeline = simulate(forward_only(d, m, v), Costs(forward=f))
    if v == 1 or m % d == 0:
        assert timeline.makespan == (v * m + d - 1) * f
    assert timeline.peak_activations == (1,) * d


@given(devices, microbatches, virtual, time)
def test_decode(d, g, t, f):
    """A token of all groups takes as long as there are groups or stages, what there is more of."""
    schedule = decode(d, g, t)
    timeline = simulate(schedule, Costs(forward=f))
    units = t * g + d - 1 if g >= d or t == 1 else t * d + g - 1
    assert timeline.makespan == units * f
    assert timeline.peak_activations == (1,) * d
    # Every device sees the groups in the same order, over and over.
    for row in schedule.rows:
        assert [action.microbatch for action in row] == list(range(g)) * t
