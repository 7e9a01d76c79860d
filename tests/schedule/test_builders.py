"""Every builder over a wide range: valid, with the published makespan, bubble and memory."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
virtual = st.integers(1, 4)
time = st.integers(1, 9)


def split(f, i, w):
    return Costs(forward=f, backward=i + w, input_grad=i, weight_grad=w)


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


@given(devices, microbatches, time, time)
def test_gpipe(d, m, f, b):
    timeline = simulate(gpipe(d, m), Costs(f, b))
    assert timeline.makespan == (m + d - 1) * (f + b)
    assert timeline.bubble == ((d - 1) * (f + b),) * d
    assert timeline.peak_activations == (m,) * d


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


@given(devices, st.integers(0, 30), time, time, time)
def test_zb_h1(d, more, f, i, w):
    m = d + more
    timeline = simulate(zb_h1(d, m), split(f, i, w))
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
    timeline = simulate(zb_h2(d, m), split(f, i, w))
    assert max(timeline.own_span_bubble) == (d - 1) * max(0, i - f, f + i - 2 * w)
    if f + i <= 2 * w and i <= 2 * f:
        assert timeline.bubble == ((d - 1) * f,) * d


@given(devices, microbatches)
def test_zb_h2_holds_almost_twice_what_1f1b_holds(d, m):
    assert simulate(zb_h2(d, m)).peak_activations == (min(m, 2 * d - 1),) * d


@given(devices, st.integers(0, 30), time)
def test_zb_v(d, more, f):
    m = 2 * d - 1 + more
    timeline = simulate(zb_v(d, m), split(f, f, f))
    assert timeline.own_span_bubble == (0,) * d
    assert timeline.bubble == ((d - 1) * f,) * d


@given(devices, microbatches)
def test_zb_v_holds_as_much_as_1f1b(d, m):
    held = simulate(zb_v(d, m)).peak_activations
    assert held == tuple(min(2 * m, m + 1 + k, 2 * d) for k in range(d))


@given(devices, st.integers(0, 20), time, time, time)
def test_dual_pipe_v(d, more, f, i, w):
    m = 2 * d + more
    timeline = simulate(dual_pipe_v(d, m), split(f, i, w))
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


@pytest.mark.parametrize("builder", [interleaved_one_f_one_b, looped_bfs, forward_only])
def test_no_virtual_stages_is_an_error(builder):
    with pytest.raises(ScheduleError, match="num_virtual_stages is 0"):
        builder(2, 2, 0)


def test_numpy_integers_are_integers():
    assert gpipe(np.int64(2), np.int32(3)) == gpipe(2, 3)


def test_interleaving_demands_a_multiple_and_says_which():
    with pytest.raises(ScheduleError, match="needs a multiple of num_devices, 4; use 4 or 8"):
        interleaved_one_f_one_b(4, 6, 2)
    with pytest.raises(ScheduleError, match="use 4 microbatches"):
        interleaved_one_f_one_b(4, 3, 2)
    assert interleaved_one_f_one_b(4, 6, 1) == one_f_one_b(4, 6)


def test_dual_pipe_v_demands_twice_the_devices():
    with pytest.raises(ScheduleError, match="needs at least twice num_devices, 8"):
        dual_pipe_v(4, 7)


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
