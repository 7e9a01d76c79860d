"""`Partition` as a value: derived numbers, JSON there and back."""

import json

import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, Partition, partition

PLAN = Partition(
    boundaries=(0, 1, 3, 4, 6),
    stage_costs=(4.0, 3.0, 1.0, 2.0),
    num_virtual_stages=2,
    stage_memory=(1.0, 2.0, 3.0, 4.0),
    memory_limit=8.0,
    layer_names=("a", "b", "c", "d", "e", "f"),
)


def test_devices_sum_over_their_stages():
    assert PLAN.num_devices == 2
    assert PLAN.device_costs == (5.0, 5.0)
    assert PLAN.device_memory == (4.0, 6.0)
    assert PLAN.bottleneck == 5.0
    assert PLAN.balance == 1.0
    assert PLAN.stages == (range(0, 1), range(1, 3), range(3, 4), range(4, 6))


def test_json_there_and_back():
    layers = [LayerCost(1, name=str(index), parameter_bytes=index) for index in range(5)]
    for plan in (PLAN, partition(layers, 2, num_microbatches=3), partition([1, 2], 1)):
        assert Partition.from_json(plan.to_json(indent=1)) == plan
    assert json.loads(PLAN.to_json())["bottleneck"] == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", r"missing: \['boundaries', 'stage_costs'\]"),
        ('{"boundaries": [0, 1], "stage_costs": [1], "color": 1}', r"unknown: \['color'\]"),
        ('{"boundaries": [0], "stage_costs": [1]}', "1 stage costs need 2 boundaries"),
        ('{"boundaries": [0, 2, 1], "stage_costs": [1, 1]}', "must rise from 0"),
        ('{"boundaries": "01", "stage_costs": [1]}', "boundaries of a partition in JSON"),
        ('{"boundaries": [0, 1], "stage_costs": ["1"]}', "stage_costs of a partition in JSON"),
        ('{"boundaries": [0, 1], "stage_costs": [1], "num_virtual_stages": 2}', "must divide"),
    ],
)
def test_invalid_json_is_refused(text, message):
    with pytest.raises(PartitionError, match=message):
        Partition.from_json(text)


def test_the_table_of_a_plain_partition():
    assert str(partition([3, 1, 1, 3], 2)).splitlines() == [
        "stage  layers  count  cost",
        "    0  0-1         2     4  " + "█" * 30,
        "    1  2-3         2     4  " + "█" * 30,
        "2 stages, bottleneck 4 (stage 0), balance 1.000, method exact",
    ]


def test_the_table_shows_memory_and_the_binding_option():
    layers = [LayerCost(1, parameter_bytes=2**30, activation_bytes=2**31)] * 6
    text = str(partition(layers, 3, memory_limit=16 * 2**30, num_microbatches=8))
    assert "14.0 GiB" in text
    assert "most memory 15.0 GiB of 16.0 GiB" in text
    assert "bound by memory_limit" in text


def test_virtual_stages_show_their_device():
    lines = str(partition([1] * 8, 4, num_virtual_stages=2)).splitlines()
    assert lines[0].split() == ["stage", "device", "layers", "count", "cost"]
    assert [line.split()[1] for line in lines[1:5]] == ["0", "1", "0", "1"]


def test_long_tables_show_the_most_expensive_stages():
    costs = [1] * 500 + [7] + [1] * 499
    lines = str(partition(costs, 1000)).splitlines()
    assert len(lines) < 75
    assert any(line.split()[0] == "500" for line in lines)
