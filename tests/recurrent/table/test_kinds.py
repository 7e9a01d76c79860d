"""Kinds of values, and the order and equality of what is addressed by them."""

import random

from pipemesh.recurrent.table.kinds import GRADS, KEPT, OUTPUTS, PENDING, Channel, Kind, Slot


def test_kinds_have_an_order_that_is_the_same_in_every_process():
    kinds = [PENDING, OUTPUTS, KEPT, GRADS]
    random.shuffle(kinds)
    assert sorted(kinds) == [GRADS, KEPT, OUTPUTS, PENDING]


def test_channels_and_slots_are_equal_by_what_they_name():
    assert Channel(Kind("grads"), 1) == Channel(GRADS, 1) != Channel(GRADS, 2)
    slots = {Slot(Channel(kind, 1), m) for kind in (KEPT, PENDING, KEPT) for m in (0, 1)}
    assert len(slots) == 4
    assert {slot.channel for slot in slots} == {Channel(KEPT, 1), Channel(PENDING, 1)}
