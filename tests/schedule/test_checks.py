"""Checks of arguments, and texts of any kind."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Action,
    Costs,
    Schedule,
    execution_order,
    from_csv,
    list_schedule,
    lower_bound,
    one_f_one_b,
    optimal_schedule,
    recompute,
    simulate,
    validate,
    write_csv,
)
from pipemesh.schedule.checks import check_name
from pipemesh.schedule.costs import costs_from_text
from pipemesh.schedule.spec import ScheduleSpec, read_table

KNOWN = ["zb_v", "one_f_one_b", "gpipe"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("One-F-One-B", "did you mean 'one_f_one_b'? "),
        ("gpip", "did you mean 'gpipe'? "),
        ("wavelike", ""),
        (None, ""),
    ],
)
def test_another_name_is_an_error_with_the_nearest_and_all(name, hint):
    assert [check_name("schedule", known, iter(KNOWN)) for known in KNOWN] == KNOWN
    with pytest.raises(ScheduleError) as error:
        check_name("schedule", name, KNOWN)
    text = str(error.value)
    assert text == f"unknown schedule {name!r}; {hint}known are gpipe, one_f_one_b, zb_v"


TABLE = one_f_one_b(2, 4)
FORWARD = ((Action(0, "F", 0),),)
MISUSES = [
    (lambda: simulate("1f1b"), "schedule is '1f1b'; it must be a Schedule"),
    (lambda: validate(None), "schedule is None; it must be a Schedule"),
    (lambda: execution_order(5), "schedule is 5;"),
    (lambda: recompute("1f1b"), "schedule is '1f1b';"),
    (lambda: write_csv("1f1b"), "schedule is '1f1b';"),
    (lambda: write_csv("1f1b", "compute_comms"), "schedule is '1f1b';"),
    (lambda: simulate("1f1b", cores=1), "schedule is '1f1b';"),
    (lambda: simulate(TABLE, "forward=1"), "costs is 'forward=1'; it must be a Costs"),
    (lambda: simulate(TABLE, 5, cores=1), "costs is 5;"),
    (lambda: lower_bound(5, (0, 1), 4), "costs is 5;"),
    (lambda: list_schedule([1, 2], 2, 4), "costs is [1, 2];"),
    (lambda: simulate(TABLE, jitter="a"), "jitter is 'a'; it must be a number from 0 to 1"),
    (lambda: simulate(TABLE, jitter=np.ones(2)), "jitter is array([1., 1.]);"),
    (lambda: simulate(TABLE, jitter=-0.1), "jitter is -0.1;"),
    (lambda: simulate(TABLE, jitter=1.1), "jitter is 1.1;"),
    (lambda: simulate(TABLE, jitter=float("nan")), "jitter is nan;"),
    (lambda: simulate(TABLE, jitter=0.1, seed="a"), "seed is 'a'; it must be an int"),
    (lambda: simulate(TABLE, cores="2"), "cores is '2'; it must be a number above 0"),
    (lambda: simulate(TABLE, cores=1, crowding="a"), "crowding is 'a';"),
    (lambda: simulate(TABLE, cores=1, loads=None), "the load of F is None;"),
    (lambda: simulate(TABLE, cores=1, loads={"F": ["a", 1]}), "the load of F is 'a';"),
    (lambda: simulate(TABLE, cores=1, loads={"Z": 1}), "unknown kind of action in loads"),
    (lambda: Schedule((("0F0",),), (0,), 1), "rows hold a str; they must hold"),
    (lambda: Schedule(5, (0,), 1), "rows hold a int;"),
    (lambda: Schedule(FORWARD, 5, 1), "stage_devices is 5; it must be a sequence of whole"),
    (lambda: Schedule(FORWARD, (0.0,), 1), "stage_devices is (0.0,);"),
    (lambda: Schedule(FORWARD, (0,), None), "num_microbatches is None; it must be an integer"),
    (lambda: Schedule(FORWARD, (0,), 1, 0), "num_slices is 0; it must be at least 1"),
    (lambda: Action(0, None, 0), "action kind is None; allowed are F, B, I, W, R"),
    (lambda: Action(None, "F", 0), "stage None, microbatch 0 must be whole numbers from 0"),
    (lambda: Action(0, "F", 1.0), "stage 0, microbatch 1.0 must be"),
    (lambda: Action(0, "F", 0, "1"), "microbatch 0, slice '1' must be"),
    (lambda: Action.from_text(b"0F0"), "an action's text is b'0F0'; it must be a str"),
    (lambda: Schedule.from_text(None), "the text of a schedule is None; it must be a str"),
    (lambda: from_csv(b"0F0,0B0"), "the CSV of a schedule is b'0F0,0B0'; it must be a str"),
    (lambda: read_table(5), "path is 5; it must be a str"),
    (lambda: Costs({0: 1}), "cost forward is {0: 1}; give a number"),
    (lambda: Costs({1, 2}), "cost forward is {1, 2}; give a number"),
    (lambda: Costs(10**400), "give a number or one number a stage"),
    (lambda: Costs().per_stage("a"), "num_stages is 'a'; it must be an integer"),
    (lambda: Costs().refined(0), "pieces is 0; it must be at least 1"),
    (lambda: lower_bound(Costs(), (0, 1), 0), "num_microbatches is 0; it must be at least 1"),
    (lambda: lower_bound(Costs(), (0, 1), 4, num_slices=0), "num_slices is 0;"),
    (lambda: lower_bound(Costs(), (0, 1), 4, 2), "memory_limits is 2; it must be a sequence of"),
    (lambda: lower_bound(Costs(), (0, 1), 4, [2]), "memory_limits has 1 values, but there are 2"),
    (lambda: lower_bound(Costs(), (), 4), "num_stages is 0; it must be at least 1"),
    (lambda: lower_bound(Costs(), ("a",), 4), "stage_devices is ('a',);"),
    (lambda: lower_bound(Costs(), (0, -1), 4), "stage_devices[1] is -1; it must be at least 0"),
    (lambda: lower_bound(Costs(), (0, 1), 4, recomputed=[1]), "recomputed has 1 values"),
    (lambda: recompute(TABLE, memory_limits=3), "memory_limits is 3; it must be a sequence of"),
    (lambda: recompute(TABLE, stages=5), "stages is 5; it must be a sequence of whole numbers"),
    (lambda: list_schedule(Costs(), 2, 4, "a"), "memory_limit is 'a'; it must be a sequence of"),
    (lambda: list_schedule(Costs(), 2, 4, {0: 1, 1: 2}), "memory_limit is {0: 1, 1: 2};"),
    (lambda: list_schedule(Costs(), 2, 4, stage_devices=5), "stage_devices is 5;"),
    (lambda: list_schedule(Costs(), 2, 4, effort="a"), "effort is 'a'; it must be a number"),
    (lambda: ScheduleSpec.from_text("1f1b").for_stages("a", 4), "num_stages is ['a'];"),
    (lambda: simulate(TABLE).activations(7), "device is 7; it must be from 0 to 1"),
    (lambda: Action(0, "FB", 0), "action kind is 'FB'; allowed are"),
    (lambda: Action(-1, "F", 0), "stage -1, microbatch 0 must be whole numbers from 0 on"),
    (lambda: Action(0, "F", 0, -1), "slice -1 must be whole numbers from 0 on"),
    (lambda: validate(Schedule((), (), 1)), "no stages"),
    (lambda: Schedule(TABLE.rows, (0, 5), 1), "stage 1 is on device 5, but there are 2 rows"),
    (lambda: simulate(TABLE, loads=2.0), "cores is None; give cores, or leave them out"),
    (lambda: simulate(TABLE, loads={"F": 1}), "cores is None; give cores, or leave them out"),
    (lambda: simulate(TABLE, crowding=0.5), "cores is None; give cores, or leave them out"),
    (lambda: simulate(TABLE, cores=0), "cores is 0; it must be a number above 0"),
    (lambda: simulate(TABLE, cores=float("inf")), "cores is inf;"),
    (lambda: simulate(TABLE, cores=1, loads=-1.0), "the load of F is -1.0;"),
    (lambda: simulate(TABLE, cores=1, loads={"F": [1.0]}), "the load of F has 1 values, but the"),
    (lambda: simulate(TABLE, cores=2, crowding=1.1), "crowding is 1.1; it must be a number from"),
    (lambda: list_schedule(Costs(), 0, 1), "num_devices is 0"),
    (lambda: list_schedule(Costs(), 1, 0), "num_microbatches is 0"),
    (lambda: list_schedule(Costs([1, 2, 3]), 2, 4), "3 stages, which is not a multiple of 2 devi"),
    (lambda: list_schedule(Costs([1, 2]), 2, 4, None, 2), "cost forward has 2 values, but the sch"),
    (lambda: list_schedule(Costs(), 2, 4, 0), "memory_limit of device 0 is 0, but it has 1 stages"),
    (lambda: list_schedule(Costs(), 2, 4, [2, 1], 2), "device 1 is 1, but it has 2 stages"),
    (lambda: list_schedule(Costs(), 2, 4, [1, 2, 3]), "memory_limit has 3 values, but there are 2"),
    (lambda: list_schedule(Costs(), 2, 4, 1.5), "memory_limit is 1.5; give an integer"),
    (lambda: list_schedule(Costs(), 2, 4, stage_devices=[0, 0]), "every device from 0 to 1"),
    (lambda: list_schedule(Costs(), 2, 4, stage_devices=[0, 1, 2]), "every device from 0 to 1"),
    (lambda: list_schedule(Costs(), 2, 4, None, 0), "num_virtual_stages is 0"),
    (lambda: optimal_schedule(Costs(), 0, 1), "num_devices is 0"),
    (lambda: optimal_schedule(Costs(), 2, 2, workers=0), "workers is 0"),
    (
        lambda: optimal_schedule(Costs(), 2, 2, time_limit=0),
        "time_limit is 0; it must be a number a",
    ),
    (lambda: optimal_schedule(Costs(), 2, 2, 0), "memory_limit of device 0 is 0"),
    (lambda: optimal_schedule(Costs([1, 0]), 2, 2), "cost forward of stage 1 is 0.0; optimal_sche"),
    (lambda: optimal_schedule(Costs([1, 0]), 2, 2), "needs durations above 0, at least 4e-08 here"),
    (lambda: optimal_schedule(Costs(1, 1, 1), 2, 2), "cost weight_grad of stage 0 is 0.0"),
    (lambda: optimal_schedule(Costs(0, 0), 2, 2), "cost forward of stage 0 is 0.0"),
    (lambda: recompute(TABLE.only_forward()), "no backward actions"),
    (lambda: recompute(recompute(TABLE)), "has recomputations already"),
    (lambda: recompute(TABLE, {2}), "stages has 2, but stages are from 0 to 1"),
    (lambda: recompute(TABLE, None, None, [1]), "memory_limits has 1 values, but there are 2 devi"),
    (lambda: recompute(TABLE, {0}, None, [2, 0]), "device 1 holds 1 even with"),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES, ids=[message for _, message in MISUSES])
def test_misuse_is_named_in_one_line(misuse, message):
    with pytest.raises(ScheduleError) as error:
        misuse()
    text = str(error.value)
    assert message in text
    assert "\n" not in text and len(text) < 200


def test_any_kind_of_number_is_accepted():
    half = [Fraction(1, 2), Decimal("0.5"), np.float32(0.5), 0.5]
    assert len({simulate(TABLE, Costs(n), jitter=n).makespan for n in half}) == 1
    shared = {simulate(TABLE, cores=n, crowding=n, loads=n).makespan for n in half}
    assert len(shared) == 1
    loads = {"F": half[:2], "B": np.asarray([1.5, 2])}
    simulate(TABLE, cores=2, loads=loads)
    limits = np.asarray([2, 2])
    found = list_schedule(Costs(), np.int64(2), np.int32(4), limits, stage_devices=np.arange(2))
    assert found == list_schedule(Costs(), 2, 4, [2, 2])
    assert recompute(TABLE, {0}, memory_limits=limits) == recompute(TABLE, [0], None, (2, 2))
    assert lower_bound(Costs(), np.arange(2), 4, limits) == lower_bound(Costs(), (0, 1), 4, [2, 2])


near_misses = st.text(alphabet='0129FBIWX .,:;#()"\n\t-=f', max_size=40)
anything = st.one_of(st.text(max_size=40), near_misses)


@settings(max_examples=40)
@given(anything)
def test_any_text_is_a_schedule_or_an_error(text):
    for parse in (Schedule.from_text, from_csv):
        try:
            schedule = validate(parse(text))
        except ScheduleError:
            continue
        assert Schedule.from_text(schedule.to_text()) == schedule


@given(anything)
def test_any_text_is_an_action_or_an_error(text):
    for parse in (Action.from_text, costs_from_text):
        try:
            parse(text)
        except ScheduleError:
            continue


@pytest.mark.parametrize("text", ["9" * 5000 + "F0", "0F" + "9" * 5000, "9" * 5000 + ": 0F0"])
def test_endless_numbers(text):
    with pytest.raises(ScheduleError):
        Schedule.from_text(text)


def test_one_typo_does_not_ask_for_gigabytes():
    with pytest.raises(ScheduleError, match="device 0 never does 0F1"):
        validate(Schedule.from_text("0F0 0B0 0F999999999 0B999999999"))
    with pytest.raises(ScheduleError, match="device 0 never does 0F0"):
        validate(Schedule.from_text("0B999999999"))
