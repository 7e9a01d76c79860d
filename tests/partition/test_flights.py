"""Activations in flight, against the definitions of the schedules and against their tables."""

from fractions import Fraction

import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import in_flight
from pipemesh.partition.flights import SCHEDULES, at_once
from pipemesh.schedule import build, simulate
from pipemesh.schedule.names import NAMES


@pytest.mark.parametrize(
    ("schedule", "microbatches", "stages", "expected"),
    [
        ("gpipe", 5, 3, (5, 5, 5)),
        ("looped_bfs", 5, 3, (5, 5, 5)),
        ("one_f_one_b", 8, 4, (4, 3, 2, 1)),
        ("one_f_one_b", 2, 4, (2, 2, 2, 1)),
        ("zb_h1", 8, 3, (3, 3, 3)),
        ("zb_h1", 2, 3, (2, 2, 2)),
        ("interleaved_one_f_one_b", 8, 4, (4, 3, 2, 1)),
    ],
)
def test_in_flight(schedule, microbatches, stages, expected):
    assert in_flight(schedule, microbatches, stages) == expected


def test_interleaving_on_two_devices_counted_by_hand():
    # Device 0 of 2 with 2 stages each and 4 microbatches warms up with 2 + 2 + 1 = 5 forward
    # actions: stage 0 twice, stage 2 twice, stage 0 again; then each F is followed by a B.
    #   F: 0 0 2 2 0 | 0    2    2
    #   B:           2    2    0    0 ...
    # so stage 0 holds up to 4 microbatches and stage 2 up to 2.
    # Device 1 warms up with 0 + 2 + 1 = 3: stage 1 twice, stage 3 once.
    assert in_flight("interleaved_one_f_one_b", 4, 4, 2) == (4, 3, 2, 1)


@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_no_stage_holds_more_than_all_microbatches_or_less_than_one(microbatches):
    counts = in_flight("interleaved_one_f_one_b", microbatches, 12, 3)
    assert all(1 <= count <= microbatches for count in counts)


def test_schedules_with_one_stage_a_device_refuse_virtual_stages():
    with pytest.raises(PartitionError, match="runs one stage on each device"):
        in_flight("zb_h1", 4, 4, 2)
    with pytest.raises(PartitionError, match="'pipe' is not one of"):
        in_flight("pipe", 4, 4)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_the_formula_of_a_name_says_what_the_table_says(name, devices):
    for rounds in (1, 2, 3) if NAMES[name].is_open else (1,):
        for microbatches in range(1, 13):
            if rounds > 1 and name == "interleaved_one_f_one_b" and microbatches % devices:
                continue
            table = build(name, devices, microbatches, rounds if NAMES[name].is_open else None)
            facts = simulate(table).for_partition()
            arguments = (name, microbatches, devices * rounds, rounds)
            assert in_flight(*arguments) == facts["in_flight"]
            turning = [share * microbatches for share in at_once(*arguments)]
            assert turning == list(facts["at_once"])


def test_an_unknown_number_of_microbatches_is_a_large_one():
    for name in SCHEDULES:
        many = at_once(name, 10**9, 4)
        assert at_once(name, None, 4) == tuple(Fraction(round(share)) for share in many)
