"""Costs as one word on a command line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs
from pipemesh.schedule.cost_text import FIELDS, costs_from_text


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("1", Costs(1)),
        ("1,2", Costs(1, 2)),
        ("1,2,0.5,1.5,0.1", Costs(1, 2, 0.5, 1.5, 0.1)),
        ("forward=1,backward=2", Costs(1, 2)),
        ("f=1:2,b=2,t=.1", Costs([1, 2], 2, transfer=0.1)),
        ("i=2, w=1", Costs(input_grad=2, weight_grad=1)),
    ],
)
def test_cost_text(text, costs):
    assert costs_from_text(text) == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f=1,forwrd=2", "costs, column 5: unknown cost 'forwrd'; did you mean 'forward'"),
        ("f=1,f=2", "column 5: forward is given twice"),
        ("1,two", "column 3: 'two' is no number"),
        ("1:", "column 1: '' is no number"),
        ("1,2,3,4,5,6,7", "column 13: more than 6 values"),
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
def test_costs_written_out_parse_back_in_any_order_and_by_first_letters(fields, order):
    written = {
        name: ":".join(map(repr, value if isinstance(value, list) else [value]))
        for name, value in fields.items()
    }
    costs = Costs(**fields)
    assert costs_from_text(",".join(f"{name}={written[name]}" for name in order)) == costs
    assert costs_from_text(", ".join(f"{name[0]}={written[name]}" for name in order)) == costs
    assert costs_from_text(",".join(written[name] for name in FIELDS)) == costs
