"""Kinds of values, and the order and equality of what is addressed by them."""

import random

from pipemesh.recurrent.table.kinds import (
    GRADS,
    KEPT,
    OUTPUTS,
    PENDING,
    REMADE,
    Channel,
    Kind,
    Slot,
    given,
    taken,
)


def test_kinds_have_an_order_that_is_the_same_in_every_process():
    kinds = [PENDING, OUTPUTS, KEPT, GRADS]
    random.shuffle(kinds)
    assert sorted(kinds) == [GRADS, KEPT, OUTPUTS, PENDING]


def test_channels_and_slots_are_equal_by_what_they_name():
    assert Channel(Kind("grads"), 1) == Channel(GRADS, 1) != Channel(GRADS, 2)
    slots = {Slot(Channel(kind, 1), m) for kind in (KEPT, PENDING, KEPT) for m in (0, 1)}
    assert len(slots) == 4
    assert {slot.channel for slot in slots} == {Channel(KEPT, 1), Channel(PENDING, 1)}


def test_channels_of_an_action_follow_the_table_of_its_kind():
    assert taken("F", 1, is_recomputed=False) == [Channel(OUTPUTS, 0)]
    assert given("F", 1) == [Channel(OUTPUTS, 1), Channel(KEPT, 1)]
    assert taken("R", 1, is_recomputed=True) == [Channel(KEPT, 1)]
    assert given("R", 1) == [Channel(REMADE, 1)]
    for kind, left in (("B", []), ("I", [Channel(PENDING, 1)])):
        for is_recomputed, start in ((False, KEPT), (True, REMADE)):
            assert taken(kind, 1, is_recomputed) == [Channel(start, 1), Channel(GRADS, 2)]
        assert given(kind, 1) == [Channel(GRADS, 1), *left]
    assert (taken("W", 1, is_recomputed=True), given("W", 1)) == ([Channel(PENDING, 1)], [])
