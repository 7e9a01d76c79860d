"""Builders: valid over a wide range, bubbles and memory as formulas, the papers' figures."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    decode,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    seq_one_f_one_b,
    simulate,
    v_half,
    v_min,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build, is_looped, looped_ticks
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.schedule import vee
from tests.schedule.random_schedules import inputs_of

devices = st.integers(1, 10)
microbatches = st.integers(1, 40)
virtual = st.integers(1, 4)
time = st.integers(1, 9)
few = settings(max_examples=20)


@given(st.sampled_from(sorted(BUILDERS)), devices, microbatches, virtual)
def test_valid_or_a_clear_demand(name, num_devices, num_microbatches, num_virtual_stages):
    share = num_virtual_stages if NAMES[name].is_open else NAMES[name].stages_a_device
    try:
        schedule = build(name, num_devices, num_microbatches, share)
    except ScheduleError as error:
        assert name in ("interleaved_one_f_one_b", "dual_pipe_v")
        assert "num_microbatches" in str(error)
        return
    validate(schedule)
    assert schedule.num_devices == num_devices
    assert schedule.num_microbatches == num_microbatches
    per_device = [schedule.stage_devices.count(d) for d in range(num_devices)]
    assert per_device == [share] * num_devices


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
        BUILDERS[name](*counts)


def test_build_by_name():
    assert build("looped_bfs", 2, 2, 3) == looped_bfs(2, 2, 3)
    assert build("zb_v", 2, 4, 2) == zb_v(2, 4)
    for builder in (interleaved_one_f_one_b, looped_bfs, forward_only, decode):
        with pytest.raises(ScheduleError, match="num_virtual_stages is 0; it must be at least 1"):
            builder(2, 2, 0)


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: build("one-f-one-C", 2, 2), "did you mean 'one_f_one_b'"),
        (lambda: build("zb_h1", 2, 2, 2), "zb_h1 always has 1 a device"),
        (lambda: build("file:x.csv", 2, 4), "not built from counts alone; use ScheduleSpec.from_t"),
        (lambda: build("list_schedule", 2, 4), r"alone; use list_schedule\(costs\)"),
        (lambda: seq_one_f_one_b(2, 2, 0), "num_slices is 0; it must be at least 1"),
        (lambda: interleaved_one_f_one_b(4, 6, 2), "a multiple of num_devices, 4; use 4 or 8"),
        (lambda: interleaved_one_f_one_b(4, 3, 2), "use 4 microbatches"),
        (lambda: dual_pipe_v(4, 7), "needs at least twice num_devices, 8"),
    ],
)
def test_impossible_builds_are_errors(build_it, message):
    with pytest.raises(ScheduleError, match=message):
        build_it()


@few
@given(devices, microbatches, virtual, time, time)
def test_looped_bfs(d, m, v, f, b):
    timeline = simulate(looped_bfs(d, m, v), Costs(f, b))
    forward = timeline.schedule.only_forward()
    assert looped_ticks(d, m, v) == simulate(forward, Costs(1)).makespan
    assert is_looped(timeline.schedule) and is_looped(forward)
    assert is_looped(gpipe(d, m)) and not is_looped(one_f_one_b(max(d, 2), m + 1))
    long_enough = m >= d or v == 1
    units = v * m + d - 1 if long_enough else v * d + m - 1
    assert timeline.makespan == units * (f + b)
    assert timeline.bubble == ((units - v * m) * (f + b),) * d
    assert timeline.peak_activations == (v * m,) * d
    assert v > 1 or gpipe(d, m) == timeline.schedule


@few
@given(devices, microbatches, virtual, time)
def test_forward_only(d, m, v, f):
    timeline = simulate(forward_only(d, m, v), Costs(forward=f))
    if v == 1 or m % d == 0:
        assert timeline.makespan == (v * m + d - 1) * f
    assert timeline.peak_activations == (1,) * d


@few
@given(devices, microbatches, virtual, time)
def test_decode(d, g, t, f):
    """Every device sees the groups in the same order, over and over."""
    timeline = simulate(decode(d, g, t), Costs(forward=f))
    assert timeline.makespan == (t * g + d - 1 if g >= d or t == 1 else t * d + g - 1) * f
    for row in timeline.schedule.rows:
        assert [action.microbatch for action in row] == list(range(g)) * t


@few
@given(devices, microbatches, time, time)
def test_one_f_one_b(d, m, f, b):
    timeline = simulate(one_f_one_b(d, m), Costs(f, b))
    assert timeline.makespan == (m + d - 1) * (f + b)
    assert timeline.bubble == ((d - 1) * (f + b),) * d
    assert timeline.peak_activations == tuple(min(m, d - k) for k in range(d))


@few
@given(devices, st.integers(1, 5), st.integers(2, 4), time, time)
def test_interleaved_one_f_one_b(d, groups, v, f, b):
    m = groups * d
    timeline = simulate(interleaved_one_f_one_b(d, m, v), Costs(f, b))
    assert timeline.bubble == ((d - 1) * (f + b),) * d
    assert timeline.peak_activations == tuple(
        min(v * m, 2 * (d - k - 1) + (v - 1) * d + 1) for k in range(d)
    )


ORDER = """
0: 0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0F2.0 0B0.0 0F2.1 0B1.1 0B1.0 0B2.1 0B2.0
1: 1F0.0 1F0.1 1F1.0 1B0.1 1F1.1 1B0.0 1F2.0 1B1.1 1F2.1 1B1.0 1B2.1 1B2.0
2: 2F0.0 2F0.1 2B0.1 2F1.0 2B0.0 2F1.1 2B1.1 2F2.0 2B1.0 2F2.1 2B2.1 2B2.0
""".strip()


def test_three_devices_cell_by_cell():
    """First microbatch first, of each the last slice first: the paper's partially ordered queue."""
    assert str(seq_one_f_one_b(3, 3, 2)) == ORDER
    assert seq_one_f_one_b(3, 5, 1) == one_f_one_b(3, 5)


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 6))
def test_sliced_bubble_and_memory_follow_the_formulas(num_devices, num_microbatches, num_slices):
    schedule = validate(seq_one_f_one_b(num_devices, num_microbatches, num_slices))
    assert schedule.num_slices == num_slices
    num_pieces = num_microbatches * num_slices
    held = tuple(min(num_pieces, num_devices - d - 1 + num_slices) for d in range(num_devices))
    whole = Costs(forward=num_slices, backward=2 * num_slices)
    timeline = simulate(schedule, whole.refined(1, num_slices))
    assert timeline.peak_activations == held
    assert timeline.bubble == pytest.approx([3 * (num_devices - 1)] * num_devices)


@few
@given(devices, microbatches)
def test_memory_of_zero_bubble_tables(d, m):
    held = {build: simulate(build(d, m)).peak_activations for build in (zb_h1, zb_h2, zb_v)}
    assert held[zb_h1] == (min(m, d),) * d
    assert held[zb_h2] == (min(m, 2 * d - 1),) * d
    assert held[zb_v] == tuple(min(2 * m, m + 1 + k, 2 * d) for k in range(d))


@few
@given(devices, st.integers(0, 30), time, time, time)
def test_zb_h1(d, more, f, i, w):
    m = d + more
    timeline = simulate(zb_h1(d, m), Costs(f, None, i, w))
    assert timeline.makespan == m * (f + i + w) + (d - 1) * max(f, i, f + i - w)
    if w <= min(f, i):
        assert timeline.bubble == ((d - 1) * (f + i - w),) * d


@few
@given(devices, st.integers(0, 30), time, time, time)
def test_zb_h2(d, more, f, i, w):
    m = 2 * d - 1 + more
    timeline = simulate(zb_h2(d, m), Costs(f, None, i, w))
    assert max(timeline.own_span_bubble) == (d - 1) * max(0, i - f, f + i - 2 * w)
    if f + i <= 2 * w and i <= 2 * f:
        assert timeline.bubble == ((d - 1) * f,) * d


@few
@given(devices, st.integers(0, 30), time)
def test_zb_v(d, more, f):
    m = 2 * d - 1 + more
    timeline = simulate(zb_v(d, m), Costs(f))
    assert timeline.own_span_bubble == (0,) * d
    assert timeline.bubble == ((d - 1) * f,) * d


@few
@given(devices, st.integers(0, 20), time, time, time)
def test_dual_pipe_v(d, more, f, i, w):
    m = 2 * d + more
    timeline = simulate(dual_pipe_v(d, m), Costs(f, None, i, w))
    assert timeline.peak_activations == (2 * d + 1,) * d
    if i <= f <= i + w:
        assert timeline.bubble == ((d - 1) * max(f, f + i - w),) * d


MEMORY = {v_half: lambda d: d // 2 + 1, v_min: lambda d: (d + 4) // 3}


@few
@given(st.sampled_from(list(MEMORY)), st.integers(1, 12), microbatches, time)
def test_v_half_and_v_min(builder, d, m, f):
    timeline = simulate(builder(d, m), Costs(f))
    assert timeline.schedule.stage_devices == vee(d)
    assert max(timeline.peak_activations) <= 2 * MEMORY[builder](d)
    if d == 1:
        assert timeline.bubble == (0,)
    elif d > 2 and m >= d + (2 if builder is v_half else 0):
        v_half_idle, v_min_idle = 3 * d - (4 if d % 2 else 7), 4 * d - (5 if d % 3 else 7)
        assert timeline.bubble == ((v_half_idle if builder is v_half else v_min_idle) * f,) * d


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7])
def test_the_steady_state_is_the_published_block(d):
    """In the middle of a long table each device does the same six actions over and over."""
    for builder in MEMORY:
        row = builder(d, 6 * d + 8).rows[d // 2]
        middle = len(row) // 2
        for action, later in zip(row[middle : middle + 6], row[middle + 6 :], strict=False):
            assert (action.stage, action.kind) == (later.stage, later.kind)
            assert action.microbatch + 1 == later.microbatch


FIGURES = Path(__file__).parent / "figures"
CASES = {
    "gpipe": (4, 4, Costs(1, 1)),
    "one_f_one_b": (4, 8, Costs(1, 2)),
    "interleaved_one_f_one_b": (4, 8, Costs(1, 2)),
    "looped_bfs": (4, 4, Costs(1, 1)),
    "zb_h1": (4, 8, Costs()),
    "zb_h2": (4, 8, Costs()),
    "zb_v": (4, 8, Costs()),
    "v_half": (4, 8, Costs()),
    "v_min": (4, 8, Costs()),
    "dual_pipe_v": (4, 10, Costs()),
    "forward_only": (4, 4, Costs()),
    "decode": (4, 4, Costs()),
}


def figure(name):
    lines = (FIGURES / f"{name}.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def drawn(name):
    """The timeline in the notation of the figures, one cell a tick."""
    num_devices, num_microbatches, costs = CASES[name]
    schedule = build(name, num_devices, num_microbatches)
    timeline = simulate(schedule, costs)
    rows = [["."] * int(timeline.makespan) for _ in schedule.rows]
    for span in timeline.spans():
        kind = span.action.kind if span.action.stage < num_devices else span.action.kind.lower()
        start, end = int(span.start), int(span.end)
        assert (start, end) == (span.start, span.end)
        rows[span.device][start:end] = [f"{kind}{span.action.microbatch + 1}"] + ["-"] * (
            end - start - 1
        )
    return rows


def test_every_builder_has_a_figure():
    assert set(CASES) == set(BUILDERS) == {path.stem for path in FIGURES.glob("*.txt")}


@pytest.mark.parametrize("name", [name for name in CASES if name != "dual_pipe_v"])
def test_table_is_the_figure(name):
    assert "Source:" in BUILDERS[name].__doc__
    assert drawn(name) == figure(name)


def test_dual_pipe_v_does_the_figures_actions_in_order():
    rows = [[cell for cell in row if cell not in ".-"] for row in drawn("dual_pipe_v")]
    assert rows == figure("dual_pipe_v")


@pytest.mark.parametrize(("d", "more", "f", "i", "w"), [(3, 1, 4, 5, 3), (4, 0, 1, 1, 1)])
def test_dual_pipe_v_with_paired_blocks_has_published_bubble(d, more, f, i, w):
    """(D - 1)(F&B + b - 3 w), where a pair takes and gives all its values at once."""
    schedule = dual_pipe_v(d, 2 * d + more)
    inputs, duration = inputs_of(schedule), {"F": f, "B": i + w, "I": i, "W": w}
    end, before = {}, None
    while end != before:
        before = dict(end)
        for row in schedule.rows:
            now, block = 0, []
            for action, following in itertools.zip_longest(row, row[1:]):
                block.append(action)
                if action.kind == "F" and following is not None and following.kind == "B":
                    continue
                needed = {a for each in block for a in inputs[each]} - set(block)
                now = max([now, *(end.get(a, 0) for a in needed)])
                now += sum(duration[each.kind] for each in block)
                end.update(dict.fromkeys(block, now))
                block = []
    bubble = max(end.values()) - 2 * schedule.num_microbatches * (f + i + w)
    assert bubble == (d - 1) * ((f + i + w) + (i + w) - 3 * w)
