"""Who waits for whom, of how far devices have come."""

import itertools

import pytest

from pipemesh.recurrent.watch.waits import Stand, waits_of
from pipemesh.schedule import gpipe, one_f_one_b, zb_h1


def stands(schedule, *ended, begun=(), silent=()):
    """How many actions each device has done; who has begun the next one; and who is silent."""
    return [
        Stand(name, row, schedule.rows[row], count + (name in begun), count, name in silent)
        for row, (name, count) in enumerate(zip("abcd", ended, strict=False))
    ]


def told(*arguments, **keywords):
    return [str(wait) for wait in waits_of(arguments[0], stands(*arguments, **keywords))]


def test_each_device_says_what_it_waits_for():
    # Rows: 0F0 0F1 0B0 ...; 1F0 1B0 1F1 ...
    assert told(one_f_one_b(2, 4), 2, 0, begun="b") == [
        "a: waits to begin 0B0, for 1B0 of b",
        "b: in 1F0",
    ]


def test_a_chain_of_waits_ends_at_the_one_who_is_at_work():
    found = told(gpipe(4, 2), 2, 2, 1, 0, begun="d")
    assert found == [
        "a: waits to begin 0B1, for 1B1 of b",
        "b: waits to begin 1B1, for 2B1 of c",
        "c: waits to begin 2F1, for what it needs to arrive",
        "d: in 3F0",
    ]


def test_who_recomputes_has_begun_and_waits_for_the_gradient():
    found = told(one_f_one_b(2, 4), 2, 1, begun="ab")
    assert found == ["a: in 0B0, waits for 1B0 of b", "b: in 1B0"]


def test_the_gradient_of_a_split_backward_pass_comes_from_its_first_half():
    schedule = zb_h1(2, 2)
    at = next(i for i, action in enumerate(schedule.rows[0]) if action.kind == "I")
    assert told(schedule, at, 1)[0] == "a: waits to begin 0I0, for 1I0 of b"


def test_who_does_not_answer_is_at_least_as_far_as_others_have_used():
    schedule = one_f_one_b(2, 4)
    # The first stage has done 0B1, so the second one has done 1B1 and what stands before it.
    done = schedule.rows[0].index(next(a for a in schedule.rows[0] if str(a) == "0B1")) + 1
    found = told(schedule, done, 0, begun="a", silent="b")
    assert found == ["a: in 0F3", "b: does not answer, in 1F2 or later"]
    found = [wait.told(str.upper) for wait in waits_of(schedule, stands(schedule, 4, 0))]
    assert found[0] == "A: waits to begin 0B1, for 1B1 of B"


def test_who_is_done_waits_for_nobody():
    schedule = one_f_one_b(2, 2)
    assert told(schedule, 4, 4) == []


def test_of_a_home_with_two_devices_the_one_that_is_behind_is_named():
    schedule = one_f_one_b(2, 2)
    both = [
        Stand("a0", 0, schedule.rows[0], 1, 1),
        Stand("a1", 0, schedule.rows[0], 1, 0),
        Stand("b", 1, schedule.rows[1], 0, 0),
    ]
    assert [str(wait) for wait in waits_of(schedule, both)] == [
        "a0: waits to begin 0F1, for what it needs to arrive",
        "a1: in 0F0",
        "b: waits to begin 1F0, for 0F0 of a1",
    ]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
def test_wherever_a_step_hangs_somebody_is_to_blame(make):
    """Not everybody waits for another: else no step would end."""
    schedule = make(3, 3)
    lengths = [len(row) for row in schedule.rows]
    for ended in itertools.product(*(range(0, n + 1, 2) for n in lengths)):
        waits = waits_of(schedule, stands(schedule, *ended))
        assert not waits or any(not wait.missing for wait in waits)
