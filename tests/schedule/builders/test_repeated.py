"""V-Half and V-Min: makespan, bubble and memory as published, over a wide range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule import Costs, build, one_f_one_b, simulate, v_half, v_min, validate, zb_v
from pipemesh.schedule.placement import vee

devices = st.integers(1, 14)
microbatches = st.integers(1, 40)
time = st.integers(1, 9)
MEMORY = {v_half: lambda d: d // 2 + 1, v_min: lambda d: (d + 4) // 3}
builders = st.sampled_from(list(MEMORY))


@pytest.mark.parametrize(
    ("builder", "size", "makespan", "held"),
    [
        (v_half, (4, 8), 26.5, 3),
        (v_min, (4, 8), 29.5, 2),
        (v_half, (8, 32), 104.5, 5),
        (v_min, (8, 32), 109.5, 4),
    ],
)
def test_published_figures(builder, size, makespan, held):
    timeline = simulate(builder(*size), Costs().refined(2))
    assert timeline.makespan == makespan
    assert max(timeline.peak_activations) == 2 * held


@given(builders, devices, microbatches, time, time, time)
def test_valid_in_their_memory_whatever_the_costs(builder, d, m, f, i, w):
    schedule = validate(builder(d, m))
    assert schedule.stage_devices == vee(d)
    timeline = simulate(schedule, Costs(f, None, i, w, transfer=0.5))
    assert max(timeline.peak_activations) <= 2 * MEMORY[builder](d)


@given(devices, st.integers(0, 20), time)
def test_bubble_of_v_half(d, more, f):
    d = max(3, d)
    timeline = simulate(v_half(d, d + 2 + more), Costs(f))
    assert timeline.bubble == ((3 * d - (4 if d % 2 else 7)) * f,) * d


@given(devices, st.integers(0, 20), time)
def test_bubble_of_v_min(d, more, f):
    d = max(3, d)
    timeline = simulate(v_min(d, d + more), Costs(f))
    assert timeline.bubble == ((4 * d - (5 if d % 3 else 7)) * f,) * d


@given(builders, microbatches)
def test_one_device_is_never_idle(builder, m):
    assert simulate(builder(1, m)).makespan == 6 * m


@pytest.mark.parametrize("d", range(4, 17))
def test_memory_against_1f1b(d):
    """Half and a third of what 1F1B's first device holds, and at most 4/3 of a microbatch more."""
    whole = max(simulate(one_f_one_b(d, 3 * d)).peak_activations)
    for builder, divisor in ((v_half, 2), (v_min, 3)):
        held = max(simulate(builder(d, 3 * d)).peak_activations) / 2
        assert held <= whole / divisor + 4 / 3


@given(devices)
def test_the_steady_state_is_the_published_block(d):
    """In the middle of a long table each device does the same six actions over and over."""
    for builder in MEMORY:
        row = builder(d, 6 * d + 8).rows[d // 2]
        middle = len(row) // 2
        for action, later in zip(row[middle : middle + 6], row[middle + 6 :], strict=False):
            assert (action.stage, action.kind) == (later.stage, later.kind)
            assert action.microbatch + 1 == later.microbatch


def test_v_zb_is_zb_v_by_its_later_name():
    assert build("V-ZB", 3, 7) == zb_v(3, 7)
