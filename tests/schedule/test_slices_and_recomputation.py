"""Slices and recomputations: text, files, order, bounds and pictures, against the obvious."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.report import to_html, to_svg, to_terminal, to_trace
from pipemesh.schedule import (
    Action,
    Costs,
    Schedule,
    execution_order,
    from_csv,
    gpipe,
    recompute,
    seq_one_f_one_b,
    simulate,
    validate,
    write_csv,
)
from pipemesh.schedule.action import needs
from pipemesh.schedule.csv import CSV_FORMS
from pipemesh.schedule.schedule import loop, vee
from pipemesh.schedule.validate import insert_transfers
from tests.schedule.rendezvous import check_rendezvous

cost = st.integers(0, 6)


def any_schedule(rng, stage_devices, num_microbatches, num_slices, split, again):
    """A schedule in which every device takes whatever is ready, at random, with slices and R."""
    last = len(stage_devices) - 1
    pieces = [
        (m, q if num_slices > 1 else None)
        for m in range(num_microbatches)
        for q in range(num_slices)
    ]
    done, rows = set(), [[] for _ in set(stage_devices)]
    todo = {
        (s, m, q): (["F"] + ["R"] * (rng.random() < again))
        + (["B"] if rng.random() < split else ["I", "W"])
        for s in range(last + 1)
        for m, q in pieces
    }

    def is_ready(s, m, q, kind):
        def went_back(stage, part):
            return {(stage, "B", m, part), (stage, "I", m, part)} & done

        if kind == "F":
            above = s == 0 or (s - 1, "F", m, q) in done
            return above and (not q or (s, "F", m, q - 1) in done)
        if kind in "BI":
            below = s == last or went_back(s + 1, q)
            return below and (q is None or q == num_slices - 1 or went_back(s, q + 1))
        return True

    while any(todo.values()):
        ready = [key for key, kinds in todo.items() if kinds and is_ready(*key, kinds[0])]
        s, m, q = rng.choice(ready)
        kind = todo[s, m, q].pop(0)
        done.add((s, kind, m, q))
        rows[stage_devices[s]].append(Action(s, kind, m, q))
    return validate(Schedule(tuple(map(tuple, rows)), stage_devices, num_microbatches, num_slices))


@st.composite
def schedules(draw):
    num_devices = draw(st.integers(1, 4))
    stages = draw(
        st.sampled_from([loop(num_devices), loop(num_devices, 2), vee(num_devices)])
        | st.permutations(loop(num_devices, 2)).map(tuple)
    )
    return any_schedule(
        random.Random(draw(st.integers(0, 10**6))),
        stages,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([0, 0.5, 1])),
        draw(st.sampled_from([0, 0.5, 1])),
    )


@given(schedules(), st.data())
def test_no_schedule_is_shorter_than_the_bound(schedule, data):
    per_stage = st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(*(data.draw(per_stage | cost) for _ in range(6)))
    timeline = simulate(schedule, costs)
    assert timeline.lower_bound <= timeline.makespan
    forward = simulate(schedule.only_forward(), costs)
    assert forward.lower_bound <= forward.makespan


@given(schedules())
def test_text_and_csv_give_it_back(schedule):
    assert Schedule.from_text(str(schedule)) == schedule
    pieces = schedule.by_pieces()
    assert from_csv(write_csv(pieces)) == pieces
    assert from_csv("\n".join(",".join(map(str, row)) for row in schedule.rows)) == schedule


@given(schedules())
def test_actions_follow_their_inputs(schedule):
    split = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "I"}
    done = set()
    for action in execution_order(schedule):
        for needed in needs(action, schedule.num_stages, split, schedule.num_slices):
            # Of one microbatch some slices may be split, and others not.
            assert needed in done or needed.also("B" if needed.kind == "I" else "I") in done
        done.add(action)
    assert len(done) == sum(map(len, schedule.rows))
    check_rendezvous(insert_transfers(schedule))


@given(schedules(), st.data())
def test_peaks_are_those_of_a_count_over_time(schedule, data):
    # Where an action takes no time, what it holds is a peak of no duration.
    timeline = simulate(schedule, Costs(data.draw(st.integers(0, 4))))
    for device in range(schedule.num_devices):
        curve = timeline.activations(device)
        assert curve[-1][1] == 0 and curve == tuple(sorted(curve, key=lambda point: point[0]))
        assert max(held for _, held in curve) == timeline.peak_activations[device]
    assert sum(timeline.in_flight) >= max(timeline.peak_activations)


@pytest.mark.parametrize("schedule", [seq_one_f_one_b(2, 2, 2), recompute(gpipe(2, 3))])
def test_pictures_show_them(schedule):
    timeline = simulate(schedule)
    sliced = schedule.num_slices > 1
    assert ("0F0.1" if sliced else "0R1") in to_terminal(timeline)
    for picture in (to_svg(timeline), to_html(timeline)):
        assert ("microbatch 0, slice 1;" if sliced else "recomputation of stage 0") in picture
    assert ('"slice": 1' if sliced else "recomputation") in to_trace(timeline)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0.0 0F0.1 0B0.0 0B0.1", r"tick 2: 0B0.0 comes before 0B0.1 \(tick 3\)"),
        ("0F0.0 0F0.1 0I0.0 0B0.1 0W0.0", r"tick 2: 0I0.0 comes before 0B0.1 \(tick 3\)"),
        ("0F0.1 0F0.0 0B0.1 0B0.0", r"tick 0: 0F0.1 comes before 0F0.0 \(tick 1\)"),
        ("0F0.0 0F0.1 0B0.1", r"never does 0B0.0 or its I and W \(0I0.0, 0W0.0\)"),
        ("0F0.0 0F1.1 0B1.1 0B0.0", r"never does 0F0.1"),
        ("0F0.0 0F0.1 0F0 0B0.1 0B0.0", r"tick 2: 0F0 does not fit a schedule of 2 slices"),
        ("0F0.0 0B0.0", r"tick 0: 0F0.0 does not fit a schedule of whole sequences"),
        ("0F0 0B0 0R0", r"tick 1: 0B0 comes before 0R0 \(tick 2\)"),
        ("0R0 0F0 0B0", r"tick 0: 0R0 comes before 0F0 \(tick 1\)"),
        ("0F0 0R0 0R0 0B0", r"tick 2: 0R0 was already done on this device at tick 1"),
        ("0F0 0R0", r"never does 0B0"),
        ("0F0 0F1 0R0 0I0 0B1", r"never does 0W0"),
    ],
)
def test_wrong_tables_are_named_by_device_tick_and_action(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.from_text(text))


@pytest.mark.parametrize("form", CSV_FORMS)
def test_csv_that_cannot_say_them_is_an_error(form):
    """PyTorch reads `0F0.1` as `0F0` without a word; it refuses `0R0`."""
    with pytest.raises(ScheduleError, match=f"0F0.0 is a slice, and CSV of the form {form} has"):
        write_csv(seq_one_f_one_b(2, 2, 2), form)
    again = recompute(gpipe(2, 3))
    if form == "compute_only":
        assert from_csv(write_csv(again)) == again
        return
    with pytest.raises(ScheduleError, match=f"0R1 is a recomputation, and CSV of the form {form}"):
        write_csv(again, form)


def test_a_slice_as_text():
    assert Action.from_text("12F3.4") == Action(12, "F", 3, 4)
    assert str(Action(12, "R", 3, 0)) == "12R3.0"
    for text, column in (("2F0.", 5), ("2F0.x", 5), ("2F0,1", 4), ("2F.1", 3)):
        with pytest.raises(ScheduleError, match=f"column {column}:"):
            Action.from_text(text)
    with pytest.raises(ScheduleError, match="slice -1 must be whole numbers from 0 on"):
        Action(0, "F", 0, -1)


def test_by_pieces_slices_are_microbatches():
    schedule = seq_one_f_one_b(2, 2, 3)
    pieces = schedule.by_pieces()
    assert (pieces.num_microbatches, pieces.num_slices) == (6, 1)
    assert str(pieces).splitlines()[1] == "1: 1F0 1F1 1F2 1B2 1F3 1B1 1F4 1B0 1F5 1B5 1B4 1B3"
    assert pieces.recomputed() == frozenset()
    assert recompute(schedule).by_pieces().recomputed() == recompute(schedule).recomputed()
    assert gpipe(2, 3).by_pieces() == gpipe(2, 3)
