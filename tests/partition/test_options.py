"""The options as a value, and checks of single ones."""

import re
from fractions import Fraction

import numpy as np
import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import in_flight
from pipemesh.partition.costs import whole
from pipemesh.partition.flights import at_once
from pipemesh.partition.options import (
    CONSTRAINTS,
    Options,
    choice,
    positive,
    round_robin,
)

GIVEN = {
    "memory_limit": [{"memory_limit": 8.0}],
    "same_stage": [{"same_stage": ((0, 1),)}],
    "fixed": [{"fixed": (2,)}, {"pinned": ((1, 2),)}],
    "min_layers": [{"min_layers": 2}],
    "max_layers": [{"max_layers": 3}],
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_without_a_constraint_is_as_if_it_had_not_been_given(name):
    others = {}
    for other in set(GIVEN) - {name}:
        others |= GIVEN[other][-1]
    for given in GIVEN[name]:
        assert Options(4, **given).active() == (name,)
        assert Options(4, **given).without(name) == Options(4)
        assert Options(4, **others, **given).without(name) == Options(4, **others)
    assert Options(4, **others).active() == tuple(n for n in CONSTRAINTS if n != name)


def test_without_bandwidth_all_else_stays():
    options = Options(4, bandwidth=2.0, max_layers=3)
    assert options.without("bandwidth") == Options(4, max_layers=3)
    assert Options(4, bandwidth=2.0).active() == ()


def test_what_is_in_flight_is_what_was_given_or_what_the_name_says():
    assert Options(4, num_microbatches=3).flights() == in_flight("one_f_one_b", 3, 4)
    looped = Options(4, schedule="looped_bfs", num_virtual_stages=2, num_microbatches=3)
    assert looped.flights() == (3, 3, 3, 3)
    assert Options(4).flights() is None
    assert Options(2, schedule=None, num_microbatches=3).flights() is None
    assert Options(2, schedule=None, in_flight=(2, 1)).flights() == (2, 1)


def test_who_recomputes():
    assert Options(3, num_microbatches=4).recomputed() == (0, 0, 0)
    assert Options(3, remat="full").recomputed() == (1, 1, 1)
    spares = Options(3, remat="except_last", schedule="gpipe", num_microbatches=4)
    assert spares.recomputed() == tuple(1 - share for share in at_once("gpipe", 4, 3))
    table = Options(3, remat="except_last", schedule=None, at_once=(0, 1, 4), num_microbatches=4)
    assert table.recomputed() == (1, Fraction(3, 4), 0)


def test_stages_go_round_unless_a_placement_says_otherwise():
    assert round_robin(6, 2) == Options(6, num_virtual_stages=2).stage_devices
    assert Options(6, num_virtual_stages=2).num_devices == 3
    assert Options(3, placement=(1, 0, 1)).stage_devices == (1, 0, 1)
    assert Options(3, placement=(1, 0, 1)).num_devices == 2


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: choice("remat", "ful", ["none", "full"]), "did you mean 'full'?"),
        (lambda: choice("remat", 3, ["none", "full"]), "remat is 3, but must be one of none, full"),
        (lambda: whole("n", 0, 1), "n is 0, but must be 1 or more"),
        (lambda: whole("n", True, 0), "n is True, but must be a whole number, 0 or more"),
        (lambda: whole("n", np.True_, 0), "but must be a whole number, 0 or more"),
        (lambda: whole("n", 2.0, 0), "n is 2.0, but must be a whole number"),
        (lambda: positive("b", 0), "b is 0, but must be a finite number above zero"),
        (lambda: positive("b", -1, zero=True), "b is -1, but must be a finite number zero or more"),
        (lambda: positive("b", float("inf")), "b is inf, but must be a finite number above zero"),
        (lambda: positive("b", "1"), "b is '1', but must be a finite number above zero"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(check, message):
    with pytest.raises(PartitionError, match=re.escape(message)):
        check()


def test_numbers_of_numpy_become_pythons():
    assert whole("n", np.int64(3), 3) == 3 and type(whole("n", np.int64(3), 3)) is int
    assert type(positive("b", np.float32(0.5))) is float
    assert positive("b", 0, zero=True) == 0
    assert choice("remat", "full", ["none", "full"]) == "full"
