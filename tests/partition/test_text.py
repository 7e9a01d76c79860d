"""Tables: what a reader has to find in them."""

import pytest

from pipemesh.partition import LayerCost, partition
from pipemesh.partition.text import bytes_text


def test_the_table_of_a_plain_partition():
    assert str(partition([3, 1, 1, 3], 2)).splitlines() == [
        "stage  layers  count  cost",
        "    0  0-1         2     4  " + "█" * 30,
        "    1  2-3         2     4  " + "█" * 30,
        "2 stages, bottleneck 4 (stage 0), balance 1.000, method exact",
    ]


def test_the_table_says_memory_and_what_binds():
    layers = [LayerCost(1, parameter_bytes=2**30, activation_bytes=2**31)] * 6
    text = str(partition(layers, 3, memory_limit=16 * 2**30, num_microbatches=8))
    assert "14.0 GiB" in text
    assert "most memory 15.0 GiB of 16.0 GiB" in text
    assert "bound by memory_limit" in text


def test_virtual_stages_show_their_device():
    lines = str(partition([1] * 8, 4, num_virtual_stages=2)).splitlines()
    assert lines[0].split() == ["stage", "device", "layers", "count", "cost"]
    assert [line.split()[1] for line in lines[1:5]] == ["0", "1", "0", "1"]


def test_a_thousand_stages_are_abridged_around_the_most_expensive():
    costs = [1] * 500 + [7] + [1] * 499
    lines = str(partition(costs, 1000)).splitlines()
    assert len(lines) < 75
    assert any(line.split()[0] == "500" for line in lines)


@pytest.mark.parametrize(
    ("number", "up", "text"),
    [
        (0, False, "0 B"),
        (1023, False, "1023 B"),
        (18.21 * 2**30, True, "18.3 GiB"),
        (18.21 * 2**30, False, "18.2 GiB"),
        (16 * 2**30, True, "16.0 GiB"),
        (2**41, False, "2.0 TiB"),
    ],
)
def test_bytes(number, up, text):
    assert bytes_text(number, up) == text
