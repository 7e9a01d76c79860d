"""Costs from files: the forms that are read, and errors that say where."""

import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost
from pipemesh.partition.read import read_costs


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("1\n2.5\n\n3e2\n", [1.0, 2.5, 300.0]),
        ("# made by hand\ncost\n1\n2\n", [1.0, 2.0]),
        ("\ufeffname,cost\r\na,1\r\nb,2\r\n", [1.0, 2.0]),
        ("[1, 2.5]", [1, 2.5]),
        ("Forward, name\n1, 'a'\n", [LayerCost(1.0, name="'a'")]),
        (
            "name,forward,backward,parameter_bytes\na,1,,8\nb,2,3,\n",
            [
                LayerCost(1, backward=None, parameter_bytes=8, name="a"),
                LayerCost(2, backward=3, name="b"),
            ],
        ),
        ("1\r2\r", [1, 2]),
        ('[{"cost": 1, "name": "a"}, {"cost": 2}]', [1, 2]),
        ('[{"forward": 1, "name": "a"}, {"forward": 2}]', [LayerCost(1, name="a"), LayerCost(2)]),
    ],
)
def test_forms(text, costs):
    assert read_costs(text, "costs.csv") == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "costs.csv is empty"),
        ("# nothing\n", "no lines but comments"),
        ("cost\n", "a header and no layers"),
        ("1\n-2\n", "line 2: cost is -2.0, but every cost must be zero or more"),
        ("1\nnan\n", "line 2: cost is nan"),
        ('["1"]', "layer 0: cost is '1', but must be a number"),
        ("a;b\n1;2\n", "separate columns with commas"),
        ("cost\n1\nx\n", "line 3: cost is 'x', but must be a number"),
        ("1,2\n", "2 columns and no header"),
        ("forwards\n1\n", "line 1: 'forwards' is no known column.*did you mean forward"),
        ("name\na\n", "neither a column cost nor a column forward"),
        ("cost,forward\n1,1\n", "has cost beside forward"),
        ("cost,cost\n1,1\n", "names a column twice"),
        ("forward,name\n1\n", "line 2 has 1 cells, but the header has 2"),
        ("forward\n-1\n", "line 2: forward is -1.0"),
        ("[1, 2", "no valid JSON"),
        ('{"costs": [1]}', "must hold a list"),
        ('[{"forward": 1}, 2]', "layer 1 is 2 among objects"),
        ('[{"flops": 1}]', "layer 0: 'flops' is no known column"),
        ('[{"name": "a"}]', "layer 0 has no forward"),
        ('[{"cost": 1}, {"name": "b"}]', "layer 1 has no cost"),
        ('[{"cost": 1, "forward": 2}]', "has cost beside forward"),
        ('[{"cost": "1"}]', "layer 0: cost is '1', but must be a number"),
        ('[{"forward": 1, "name": 5}]', "layer 0: name of a layer is 5, but must be a string"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "1" * 5000 + "]", "costs.csv"),
        ("1\n" + "2" * 200_000, "line 2 is no CSV: field larger"),
        ('[{"forward": "1"}]', "layer 0: forward is '1', but must be a number"),
    ],
)
def test_errors_say_where(text, message):
    with pytest.raises(PartitionError, match=message):
        read_costs(text, "costs.csv")
