"""Costs: what is left out, what does not fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs
from pipemesh.schedule.costs import FIELDS, costs_from_text


@pytest.mark.parametrize(
    ("given_costs", "expected"),
    [
        ({}, (1, 2, 1, 1, 0, 1, 0, 0)),
        ({"forward": 3}, (3, 6, 3, 3, 0, 3, 0, 0)),
        ({"backward": 3}, (1, 3, 1.5, 1.5, 0, 1, 0, 0)),
        ({"backward": 3, "input_grad": 1}, (1, 3, 1, 2, 0, 1, 0, 0)),
        ({"backward": 3, "weight_grad": 1}, (1, 3, 2, 1, 0, 1, 0, 0)),
        ({"input_grad": 2, "weight_grad": 1}, (1, 3, 2, 1, 0, 1, 0, 0)),
        ({"forward": 2, "weight_grad": 1}, (2, 3, 2, 1, 0, 2, 0, 0)),
        ({"backward": 2, "input_grad": 3, "weight_grad": 4}, (1, 2, 3, 4, 0, 1, 0, 0)),
        ({"forward": [1, 2]}, ((1, 2), (2, 4), (1, 2), (1, 2), 0, (1, 2), 0, 0)),
        ({"backward": [2, 4], "input_grad": 1}, (1, (2, 4), 1, (1, 3), 0, 1, 0, 0)),
    ],
)
def test_omitted_costs_follow_from_the_others(given_costs, expected):
    costs = Costs(**given_costs)
    assert tuple(getattr(costs, name) for name in FIELDS) == expected


def test_arrays_are_sequences_and_the_value_hashes():
    costs = Costs(forward=np.array([1.0, 2.0]), transfer=np.float32(0.5))
    assert costs.forward == (1.0, 2.0)
    assert hash(costs) == hash(Costs(forward=[1, 2], transfer=0.5))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"forward": -1}, "cost forward is -1.0; durations are finite and not negative"),
        ({"forward": [1, float("nan")]}, "cost forward of stage 1 is nan"),
        ({"transfer": float("inf")}, "cost transfer is inf"),
        ({"forward": "1"}, "cost forward is '1'; give a number"),
        ({"forward": [1, "x"]}, "cost forward is .*; give a number"),
        ({"forward": object()}, "give a number"),
        ({"forward": []}, "cost forward is empty"),
        ({"forward": [1, 2], "backward": [1, 2, 3]}, "forward has 2, .*backward has 3"),
        ({"backward": [1, 2], "input_grad": [1]}, "backward has 2, input_grad has 1"),
        ({"backward": 1, "input_grad": 2}, "more than the whole backward"),
    ],
)
def test_bad_costs_are_errors(bad, message):
    with pytest.raises(ScheduleError, match=message):
        Costs(**bad)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3))
def test_refined_costs_are_the_same_model(forward, pieces, num_slices):
    costs = Costs(forward=forward, transfer=0.5, gradient_sum=2, all_gather=3)
    fine = costs.refined(pieces, num_slices)
    assert fine.num_stages == len(forward) * pieces
    for name in ("forward", "backward", "recompute"):
        total = sum(getattr(costs, name)) / num_slices
        assert sum(getattr(fine, name)) == pytest.approx(total)
    assert fine.transfer == 0.5 / num_slices
    assert (fine.gradient_sum, fine.all_gather) == (2 / pieces, 3 / pieces)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f=1,forwrd=2", "costs, column 5: unknown cost 'forwrd'; did you mean 'forward'"),
        ("f=1,f=2", "column 5: forward is given twice"),
        ("1,two", "column 3: 'two' is not a number"),
        ("1:", "column 1: '' is not a number"),
        ("1,2,3,4,5,6,7,8,9", "column 17: more than 8 values"),
        ("f=-1", "cost forward is -1.0"),
    ],
)
def test_bad_cost_text_points_at_the_column(text, message):
    with pytest.raises(ScheduleError, match=message):
        costs_from_text(text)


NUMBER = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)
FIELD = NUMBER | st.lists(NUMBER, min_size=2, max_size=2)


@settings(max_examples=40)
@given(st.fixed_dictionaries({name: FIELD for name in FIELDS}), st.permutations(FIELDS))
def test_costs_parse_back_in_any_order_and_abbreviated(fields, order):
    written = {
        name: ":".join(map(repr, value if isinstance(value, list) else [value]))
        for name, value in fields.items()
    }
    costs = Costs(**fields)
    assert costs_from_text(",".join(f"{name}={written[name]}" for name in order)) == costs
    assert costs_from_text(", ".join(f"{name[0]}={written[name]}" for name in order)) == costs
    assert costs_from_text(",".join(written[name] for name in FIELDS)) == costs


def test_any_cost_may_be_left_out_of_the_text():
    assert costs_from_text("1,2") == Costs(1, 2)
    assert costs_from_text("f=1:2,t=.1") == Costs([1, 2], transfer=0.1)
