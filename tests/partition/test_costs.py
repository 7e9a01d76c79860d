"""Costs: defaults, checks, and numbers as integers."""

import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, partition
from pipemesh.partition.costs import as_stack, prefix_sums, to_big_integers, to_integers


def test_backward_is_twice_forward_unless_given():
    assert LayerCost(2.0).total == 6.0
    assert LayerCost(2.0, backward=0.0).total == 2.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward": -1}, "forward is -1, but every cost must be zero or more"),
        ({"forward": math.nan, "name": "a"}, "forward of layer 'a' is nan, which is not a number"),
        ({"forward": 1, "backward": math.inf}, "backward is inf, but every cost must be finite"),
        ({"forward": "1"}, "forward is '1', but must be a number"),
        ({"forward": 1, "parameter_bytes": None}, "parameter_bytes is None"),
        ({"forward": 1, "activation_bytes": -2}, "activation_bytes is -2"),
        ({"forward": 1, "boundary_bytes": True}, "boundary_bytes is True"),
        (
            {"forward": 1, "activation_bytes": 2, "shared_bytes": 3, "name": "a"},
            "shared_bytes of layer 'a' is 3, but its activation_bytes are only 2",
        ),
    ],
)
def test_wrong_numbers_are_named(fields, message):
    with pytest.raises(PartitionError, match=message):
        LayerCost(**fields)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([], "costs is empty; give one cost a layer"),
        (3, "must be a sequence"),
        ("12", "must be a sequence"),
        ([1, float("nan")], r"costs\[1\] is nan"),
        ([1, -1], r"costs\[1\] is -1, but every cost must be zero or more"),
        ([1, math.inf], r"costs\[1\] is inf, but every cost must be finite"),
        ([1, "a"], r"costs\[1\] is 'a', but must be a number"),
        ([1, True], r"costs\[1\] is True, but must be a number"),
        ([1, None], r"costs\[1\] is None, but must be a number"),
        ([[1, 2], [3, 4]], r"costs\[0\] is \[1, 2\]"),
        (np.ones((2, 2)), r"shape \(2, 2\)"),
        (np.asarray(["a"]), "flat sequence of numbers"),
        ([0, 0], "costs of all 2 layers are zero"),
        ([1e308, 1e308], "sum of the costs is too large"),
        ([10**400], "too large for a float"),
        ([1, LayerCost(1)], "give numbers only or LayerCost only"),
        ({0: 5, 1: 1}, "costs is dict, but must be a sequence"),
        ({5, 1}, "costs is set, but must be a sequence"),
        (np.asarray(5.0), "costs is ndarray, but must be a sequence"),
        (
            [1, 2**53 + 1],
            r"costs\[1\] is 9007199254740993, which a float rounds to 9007199254740992",
        ),
        (np.asarray([2**63 - 1]), "a float rounds to 9223372036854775808; give .* a larger unit"),
    ],
)
def test_invalid_costs_are_named(costs, message):
    with pytest.raises(PartitionError, match=message):
        as_stack(costs)


def test_any_kind_of_number_is_a_cost():
    kinds = [Fraction(1, 2), Decimal("1.5"), np.float32(2.5), np.int64(3)]
    assert as_stack(kinds).forward.tolist() == [0.5, 1.5, 2.5, 3.0]
    # As JAX and PyTorch have them.
    assert as_stack([np.array(2.5), np.array(3)]).forward.tolist() == [2.5, 3.0]
    layer = LayerCost(
        Decimal("0.5"),
        backward=None,
        parameter_bytes=Fraction(5),
        activation_bytes=Decimal(4),
        boundary_bytes=np.int64(3),
        shared_bytes=Fraction(1),
    )
    assert (layer.total, as_stack([layer] * 2).shared_bytes.tolist()) == (1.5, [0.0, 1.0])
    any_kind = {
        "memory_limit": Decimal(1000),
        "num_microbatches": np.int32(4),
        "speeds": np.asarray([0.5, 2]),
        "bandwidth": Fraction(3, 2),
        "overlap_transfers": 1,
        "in_flight": np.asarray([4, 2]),
        "stage_devices": np.asarray([1, 0]),
        "max_layers": np.int32(3),
        "same_stage": [[1, np.int64(0)]],
        "fixed": {1: np.int64(2)},
    }
    plan = partition([layer] * 4, 2, remat="full", **any_kind)
    assert plan == partition(
        [layer] * 4,
        2,
        memory_limit=1000,
        num_microbatches=4,
        speeds=(0.5, 2.0),
        bandwidth=1.5,
        overlap_transfers=True,
        in_flight=(4, 2),
        stage_devices=(1, 0),
        max_layers=3,
        same_stage=((0, 1),),
        fixed={1: 2},
        remat="full",
    )
    assert json.loads(plan.to_json())["placement"] == [1, 0]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.integers(0, 6))
def test_floats_become_their_shortest_decimals(numbers, decimals):
    values = np.asarray([number / 10**decimals for number in numbers])
    integers, unit = to_integers(values)
    assert [int(i) * unit for i in integers] == [Fraction(n, 10**decimals) for n in numbers]


def test_a_common_divisor_moves_into_the_unit():
    integers, unit = to_integers(np.asarray([3.0e12, 9.0e12, 0.0]))
    assert integers.tolist() == [1, 3, 0]
    assert unit == 3 * 10**12


def test_numbers_without_short_decimals_have_no_decimal_form():
    assert to_integers(np.asarray([1 / 3])) is None
    assert to_integers(np.asarray([1e300, 1.0])) is None


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=5))
def test_the_binary_form_loses_nothing(numbers):
    integers, unit = to_big_integers(np.asarray(numbers))
    assert [int(i) * unit for i in integers] == [Fraction(n) for n in numbers]


def test_prefix_sums_of_python_integers_do_not_overflow():
    huge = np.asarray([2**70, 1, 2**70], dtype=object)
    assert prefix_sums(huge).tolist() == [0, 2**70, 2**70 + 1, 2**71 + 1]
