"""Dims and shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ShapeError
from pipemesh.mesh import Dim, Shape

NAMES = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)
# A fixed size for a name, so that any two shapes fit each other.
SHAPES = st.lists(st.sampled_from("abcdef"), unique=True).map(
    lambda names: Shape(tuple(Dim(name, ord(name) - 95) for name in names))
)


@given(st.dictionaries(NAMES, st.integers(0, 1000), max_size=5))
def test_text_parses_back(sizes):
    shape = Shape.of(**sizes)
    assert Shape.from_text(str(shape)) == shape


@given(SHAPES, SHAPES)
def test_operators_of_sets_keep_the_order_of_the_left(a, b):
    assert set(a | b) == set(a) | set(b)
    assert set(a & b) == set(a) & set(b)
    assert set(a - b) == set(a) - set(b)
    assert (a <= b) == (set(a) <= set(b))
    assert (a | b).dims[: len(a)] == a.dims
    assert [dim for dim in a if dim in (a & b)] == list((a & b).dims)
    assert (a | b).size * (a & b).size == a.size * b.size


@given(SHAPES)
def test_equal_shapes_hash_alike_and_dims_are_found_by_name(shape):
    assert {shape: 1}[Shape.from_text(str(shape))] == 1
    for position, dim in enumerate(shape):
        assert shape[dim.name] == dim
        assert shape.index(dim.name) == shape.index(dim) == position
        assert dim in shape and dim.name in shape


def test_dims_can_be_taken_out_chosen_and_replaced():
    shape = Shape.of(batch=2, heads=3, io=4)
    assert str(shape.without("heads")) == "batch:2;io:4"
    assert str(shape.select("io", "batch")) == "io:4;batch:2"
    assert str(shape.replace("heads", Dim("x", 1), Dim("y", 3))) == "batch:2;x:1;y:3;io:4"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shape((Dim("a", 1), Dim("a", 2))), "'a' occurs twice"),
        (lambda: Shape.of(batch=1)["bacth"], "did you mean 'batch'"),
        (lambda: Shape.of(a=1) | Shape.of(a=2), "size 1 in 'a:1' and 2 in 'a:2'"),
        (lambda: Shape.of(a=1).index(Dim("a", 2)), "has size 2"),
        (lambda: Shape.from_text("a=1"), "'a=1' is not name:size"),
        (lambda: Shape().without("a"), "there are none"),
        (lambda: Dim("a b", 1), "'a b' is no name"),
        (lambda: Dim(3, 2), "3 is no name"),
        (lambda: Dim("a", -1), "size -1"),
        (lambda: Dim("a", 2.5), "size 2.5; sizes are whole"),
        (lambda: Dim("a", True), "size True"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


DIM_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
BLANKS = st.text(alphabet=" \t\n", max_size=2)


@given(DIM_NAMES, st.integers(0, 10**12), st.lists(BLANKS, min_size=4, max_size=4))
def test_text_of_a_dim_parses_back_with_any_blanks(name, size, blanks):
    dim = Dim(name, size)
    a, b, c, d = blanks
    assert Dim.from_text(str(dim)) == dim
    assert Dim.from_text(f"{a}{name}{b}:{c}{size}{d}") == dim


@pytest.mark.parametrize(
    "text", ["", "heads", "heads=8", ":8", "heads:", "heads:-1", "heads:2.0", "8:heads", "a b:8"]
)
def test_other_text_of_a_dim_is_an_error_with_an_example(text):
    with pytest.raises(ShapeError) as error:
        Dim.from_text(text)
    assert str(error.value) == f"{text!r} is not name:size; write for example 'heads:8'"


def test_a_size_may_be_an_integer_of_numpy():
    dim = Dim("a", np.int64(3))
    assert dim == Dim("a", 3) and type(dim.size) is int
