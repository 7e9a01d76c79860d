"""Activations in flight, against the definitions of the schedules and against their tables."""

from fractions import Fraction

import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, in_flight, partition
from pipemesh.partition.flights import SCHEDULES, at_once
from pipemesh.schedule import Schedule, build, gpipe, one_f_one_b, simulate, zb_v
from pipemesh.schedule_names import NAMES


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


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("remat", ["none", "full", "except_last"])
def test_a_name_and_its_table_give_the_same_partition(name, remat):
    layers = [LayerCost(1, 2, 3, number % 3, 1) for number in range(10)]
    table = build(name, 2, 4)
    options = {"remat": remat, "memory_limit": 90}
    by_name = partition(layers, table.num_stages, schedule=name, num_microbatches=4, **options)
    facts = simulate(table).for_partition()
    assert by_name == partition(layers, table.num_stages, **facts, **options)


LAYERS = [LayerCost(1, 2, 3, 4, 5)] * 6
V = {"in_flight": (4, 3, 2, 1), "stage_devices": (0, 1, 1, 0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**V, "schedule": "gpipe"}, "schedule is 'gpipe' and in_flight is given, but both say"),
        ({"in_flight": (1, 2)}, "in_flight has 2 numbers for 4 stages; give one a stage"),
        ({"in_flight": 3}, "in_flight is 3, but must be a sequence"),
        ({"in_flight": (1, 2, 3, 0.5)}, r"in_flight\[3\] is 0\.5, but must be a whole number"),
        ({**V, "num_microbatches": 3}, r"in_flight\[0\] is 4, but num_microbatches is 3"),
        ({"stage_devices": (0, 1)}, "stage_devices has 2 numbers for 4 stages"),
        ({"stage_devices": (0, 2, 2, 0)}, "no stage is on device 1; devices are numbered"),
        ({**V, "num_virtual_stages": 4}, "num_virtual_stages is 4, but stage_devices has 2"),
        ({"at_once": (0, 0, 0, 2)}, "at_once counts microbatches, so it needs num_microbatches"),
        (
            {"at_once": (0, 0, 0, 2), "num_microbatches": 1},
            r"at_once\[3\] is 2, but num_microbatch",
        ),
        ({"stage_devices": (0, 1, 1, 0), "memory_limit": 9}, "memory_limit needs in_flight beside"),
        ({**V, "remat": "except_last"}, "remat='except_last' needs at_once beside in_flight"),
        ({"schedule": "zb_v"}, r"schedule is 'zb_v', .* give in_flight and stage_devices \(from"),
        ({**V, "speeds": [1, 1, 1, 1]}, "speeds has 4 numbers for 2 devices"),
    ],
)
def test_what_a_table_says_is_checked(options, message):
    with pytest.raises(PartitionError, match=message):
        partition(LAYERS, 4, **options)


def test_nothing_crosses_where_a_v_turns():
    layers = [LayerCost(1, 2, boundary_bytes=3)] * 4
    plan = partition(layers, 4, bandwidth=3, stage_devices=(0, 1, 1, 0))
    assert plan.stage_costs == (4.0, 4.0, 4.0, 4.0)
    assert partition(layers, 4, bandwidth=3, num_virtual_stages=2).stage_costs == (4, 5, 5, 4)


def test_what_is_too_large_for_a_table_names_the_device_and_a_limit_that_works():
    facts = simulate(zb_v(2, 4)).for_partition()
    with pytest.raises(
        PartitionError, match=r"device \d needs .* from a memory_limit of"
    ) as caught:
        partition(LAYERS, 4, memory_limit=20, **facts)
    assert "stages," not in str(caught.value) and "microbatches" not in str(caught.value)


def test_speeds_belong_to_devices_wherever_stages_lie():
    plan = partition([6.0, 2, 3], 3, stage_devices=(1, 2, 0), speeds=[1, 3, 1])
    assert plan.stage_costs == (2.0, 2.0, 3.0)
    assert plan.device_costs == (3.0, 2.0, 2.0)


def test_a_table_may_be_any_and_hold_nothing():
    assert simulate(gpipe(2, 3).only_forward()).in_flight == (1, 1)
    table = Schedule.from_text("0: 0F0 0F1 0B1 0B0\n1: 1F0 1F1 1B1 1B0")
    assert simulate(table).in_flight == (2, 2)
    assert simulate(one_f_one_b(2, 1)).for_partition()["at_once"] == (1, 1)
