"""Zero bubble with one stage a device: bubble and memory as published, over a wide range."""

from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule import Costs, one_f_one_b, simulate, zb_h1, zb_h2

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
time = st.integers(1, 9)


@given(devices, st.integers(0, 30), time, time, time)
def test_zb_h1(d, more, f, i, w):
    m = d + more
    timeline = simulate(zb_h1(d, m), Costs(f, None, i, w))
    assert timeline.makespan == m * (f + i + w) + (d - 1) * max(f, i, f + i - w)
    if w <= min(f, i):
        assert timeline.bubble == ((d - 1) * (f + i - w),) * d


@given(devices, microbatches)
def test_zb_h1_holds_what_1f1b_holds_on_its_first_device(d, m):
    held = simulate(zb_h1(d, m)).peak_activations
    assert held == (min(m, d),) * d
    assert max(held) == max(simulate(one_f_one_b(d, m)).peak_activations)


@given(devices, st.integers(0, 30), time, time, time)
def test_zb_h2(d, more, f, i, w):
    m = 2 * d - 1 + more
    timeline = simulate(zb_h2(d, m), Costs(f, None, i, w))
    assert max(timeline.own_span_bubble) == (d - 1) * max(0, i - f, f + i - 2 * w)
    if f + i <= 2 * w and i <= 2 * f:
        assert timeline.bubble == ((d - 1) * f,) * d


@given(devices, microbatches)
def test_zb_h2_holds_almost_twice_what_1f1b_holds(d, m):
    assert simulate(zb_h2(d, m)).peak_activations == (min(m, 2 * d - 1),) * d
