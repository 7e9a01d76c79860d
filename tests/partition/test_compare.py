"""Partitions of the same layers side by side."""

import pytest

from pipemesh.partition import Partition, partition
from pipemesh.partition.compare import comparison


def test_a_comparison_shows_methods_side_by_side_and_why_one_is_missing():
    plans = {"exact": partition([1] * 4, 2), "lingvo": "breaks something"}
    text = comparison(plans)
    assert "exact: layers" in text
    assert text.endswith("lingvo: breaks something")


def test_each_method_has_its_layers_its_costs_and_a_summary():
    plans = {
        "exact": Partition((0, 2, 4), (4.0, 4.0)),
        "uniform": Partition((0, 4, 4), (8.0, 0.0), method="uniform"),
    }
    assert [line.split() for line in comparison(plans).splitlines()] == [
        ["stage", "exact:", "layers", "cost", "uniform:", "layers", "cost"],
        ["0", "0-1", "4", "0-3", "8"],
        ["1", "2-3", "4", "-", "0"],
        ["-" * len(comparison(plans).splitlines()[0])],
        ["bottleneck", "4", "8"],
        ["over", "the", "best", "0%", "+100.0%"],
        ["balance", "1.000", "0.500"],
        ["empty", "stages", "0", "1"],
    ]


@pytest.mark.parametrize(("stages", "shown"), [(64, 64), (65, 64), (500, 64)])
def test_of_many_stages_the_first_and_the_last_are_shown(stages, shown):
    lines = comparison({"exact": partition([1.0] * stages, stages)}).splitlines()
    rows = [line.split()[0] for line in lines[1:-5]]
    half = shown // 2
    numbers = [*map(str, range(half)), *map(str, range(stages - half, stages))]
    assert rows == (numbers if stages == shown else [*numbers[:half], "...", *numbers[half:]])


def test_where_no_method_works_the_reasons_are_left():
    assert comparison({"lingvo": "breaks a", "uniform": "breaks b"}) == (
        "lingvo: breaks a\nuniform: breaks b"
    )
