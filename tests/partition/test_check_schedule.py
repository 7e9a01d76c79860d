"""What is said of the schedule, by name and by numbers."""

import numpy as np
import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, partition
from pipemesh.partition.check_schedule import check_schedule
from pipemesh.partition.options import Options


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "options", "message"),
    [
        (6, 3, {"num_virtual_stages": 2}, "use 2 or 4 stages"),
        (6, 2, {"schedule": "1f2b"}, "did you mean '1f1b'"),
        (6, 2, {"num_microbatches": 0}, "num_microbatches is 0, but must be 1 or more"),
        (
            4,
            4,
            {"num_virtual_stages": 2, "schedule": "one_f_one_b"},
            "one stage on each device",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_says_what_would(num_layers, num_stages, options, message):
    with pytest.raises(PartitionError, match=message):
        partition([1.0] * num_layers, num_stages, **options)


LAYERS = [LayerCost(1, backward=2, parameter_bytes=3, activation_bytes=4, boundary_bytes=5)] * 6
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
        ({"schedule": "zb_v"}, r"schedule is 'zb_v', .* give in_flight and stage_devices \(from"),
    ],
)
def test_what_a_table_says_is_checked(options, message):
    with pytest.raises(PartitionError, match=message):
        partition(LAYERS, 4, **options)


def checked(stages, **asked):
    nothing = dict.fromkeys(
        ("schedule", "in_flight", "stage_devices", "at_once", "num_microbatches"), None
    )
    return check_schedule(stages, nothing | {"num_virtual_stages": None} | asked)


@pytest.mark.parametrize(
    ("asked", "name", "rounds"),
    [
        ({}, "one_f_one_b", 1),
        ({"num_virtual_stages": 1}, "one_f_one_b", 1),
        ({"num_virtual_stages": 3}, "interleaved_one_f_one_b", 3),
        ({"schedule": "interleaved"}, "interleaved_one_f_one_b", 2),
        ({"schedule": "Looped-BFS:3"}, "looped_bfs", 3),
        ({"schedule": "looped_bfs", "num_virtual_stages": 6}, "looped_bfs", 6),
        ({"schedule": "zb_h1"}, "zb_h1", 1),
    ],
)
def test_a_name_and_the_stages_of_a_device_follow_from_each_other(asked, name, rounds):
    found = checked(6, **asked)
    assert found == Options(6, schedule=name, num_virtual_stages=rounds)


@pytest.mark.parametrize(
    ("homes", "placement", "rounds"),
    [
        ((0, 1, 0, 1), (), 2),  # They go round, as without a word.
        ((0, 1, 1, 0), (0, 1, 1, 0), 2),
        ((1, 0, 2, 3), (1, 0, 2, 3), 1),
        ((0, 0, 0, 0), (), 4),
        ((0, 0, 1, 0), (0, 0, 1, 0), 3),
        (np.asarray([0, 1, 2, 3]), (), 1),
    ],
)
def test_a_placement_says_how_many_stages_a_device_has_at_most(homes, placement, rounds):
    found = checked(4, stage_devices=homes)
    assert (found.placement, found.num_virtual_stages, found.schedule) == (placement, rounds, None)
    assert found.stage_devices == tuple(homes)


def test_numbers_of_a_table_are_kept_as_pythons():
    counts = {"in_flight": np.asarray([3, 2]), "at_once": [0, 3], "num_microbatches": np.int64(3)}
    found = checked(2, **counts)
    assert found == Options(2, schedule=None, in_flight=(3, 2), at_once=(0, 3), num_microbatches=3)
    assert all(type(count) is int for count in (*found.in_flight, found.num_microbatches))
