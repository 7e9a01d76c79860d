"""Zero bubble on a V: bubble and memory as published, over a wide range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, dual_pipe_v, simulate, zb_v

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
time = st.integers(1, 9)


@given(devices, st.integers(0, 30), time)
def test_zb_v(d, more, f):
    m = 2 * d - 1 + more
    timeline = simulate(zb_v(d, m), Costs(f))
    assert timeline.own_span_bubble == (0,) * d
    assert timeline.bubble == ((d - 1) * f,) * d


@given(devices, microbatches)
def test_zb_v_holds_as_much_as_1f1b(d, m):
    held = simulate(zb_v(d, m)).peak_activations
    assert held == tuple(min(2 * m, m + 1 + k, 2 * d) for k in range(d))


@given(devices, st.integers(0, 20), time, time, time)
def test_dual_pipe_v(d, more, f, i, w):
    m = 2 * d + more
    timeline = simulate(dual_pipe_v(d, m), Costs(f, None, i, w))
    assert timeline.peak_activations == (2 * d + 1,) * d
    if i <= f <= i + w:
        assert timeline.bubble == ((d - 1) * max(f, f + i - w),) * d


def blocks_of_dual_pipe_v(row):
    """The row with each forward and the full backward right after it as one block."""
    blocks, index = [], 0
    while index < len(row):
        pair = row[index : index + 2]
        blocks.append(pair if [a.kind for a in pair] == ["F", "B"] else pair[:1])
        index += len(blocks[-1])
    return blocks


@pytest.mark.parametrize("d", [2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 6])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 2), (4, 5, 3)])
def test_dual_pipe_v_has_the_published_bubble_if_pairs_are_one_block(d, more, f, i, w):
    """(D - 1)(F&B + b - 3 w), where a pair takes and gives all its values at once."""
    m = 2 * d + more
    schedule = dual_pipe_v(d, m)
    duration = {"F": f, "B": i + w, "I": i, "W": w}
    rows = [blocks_of_dual_pipe_v(row) for row in schedule.rows]
    end, now = {}, [0] * d

    def needs(action):
        s, k = action.stage, action.microbatch
        if action.kind == "F":
            return [("F", s - 1, k)] if s else []
        return [("G", s + 1, k)] if action.kind != "W" and s < 2 * d - 1 else []

    position = [0] * d
    while any(p < len(row) for p, row in zip(position, rows, strict=True)):
        progress = False
        for device, row in enumerate(rows):
            while position[device] < len(row):
                block = row[position[device]]
                wanted = [n for a in block for n in needs(a)]
                if not all(n in end for n in wanted):
                    break
                start = max([now[device], *(end[n] for n in wanted)])
                now[device] = start + sum(duration[a.kind] for a in block)
                for a in block:
                    result = {"B": "G", "I": "G"}.get(a.kind, a.kind)
                    end[result, a.stage, a.microbatch] = now[device]
                position[device] += 1
                progress = True
        assert progress
    bubble = max(now) - 2 * m * (f + i + w)
    assert bubble == (d - 1) * ((f + i + w) + (i + w) - 3 * w)


def test_dual_pipe_v_demands_twice_the_devices():
    with pytest.raises(ScheduleError, match="needs at least twice num_devices, 8"):
        dual_pipe_v(4, 7)
