"""Which processor holds what; the examples are those of Mesh TensorFlow's README."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import LayoutError
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape, TensorLayout

MESH = Mesh.from_text("processor_rows:2;processor_cols:4")
IMAGES = Shape.of(batch=100, rows=28, cols=28, channels=3)


def image_layout(rules):
    return LayoutRules.from_text(rules).tensor_layout(IMAGES, MESH)


def at(row, col):
    return MESH.processor({"processor_rows": row, "processor_cols": col})


def test_batch_or_images_are_split():
    layout = image_layout("batch:processor_cols")
    assert layout.slice_shape == (25, 28, 28, 3)
    assert layout.slice_ranges(at(0, 3))[0] == slice(75, 100)
    assert layout.slice_ranges(at(1, 3)) == layout.slice_ranges(at(0, 3))
    layout = image_layout("rows:processor_rows;cols:processor_cols")
    rows_and_cols = slice(0, 14), slice(7, 14)
    assert layout.slice_ranges(at(0, 1)) == (slice(0, 100), *rows_and_cols, slice(0, 3))
    assert str(layout) == "batch:100;rows:28/processor_rows;cols:28/processor_cols;channels:3"


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            "rows:processor_rows;cols:processor_rows",
            ["'rows' and 'cols'", "axis 'processor_rows'", "rule 'rows:processor_rows'"],
        ),
        ("channels:processor_cols", ["'channels'", "size 3", "4 equal", "multiple of 4"]),
        ("batch:procesor_cols", ["did you mean 'processor_cols'"]),
    ],
)
def test_illegal_rules_name_dims_axes_sizes_and_the_rule(rules, words):
    with pytest.raises(LayoutError) as error:
        image_layout(rules)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: LayoutRules.from_text("batch:processor_rows;batch:processor_cols"),
            "'batch:processor_rows' or 'batch:processor_cols'",
        ),
        (
            lambda: LayoutRules.from_text("bacth:processor_rows").check(MESH, IMAGES.names),
            r"'bacth'.*did you mean 'batch'",
        ),
        (lambda: LayoutRules((("batch", 2),)), "is not a pair of names"),
        (lambda: LayoutRules((("ba tch", "data"),)), "is not a pair of names"),
        (lambda: LayoutRules(((None, "data"),)), "is not a pair of names"),
        *(
            (lambda text=text: LayoutRules.from_text(text), "is not dim:axis")
            for text in ("batch", "batch:data;", "batch=data", ":", "batch:2")
        ),
    ],
)
def test_wrong_rules_are_named(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


NAMES = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)


@given(st.dictionaries(NAMES, NAMES, max_size=4))
def test_text_of_rules_parses_back(rules):
    layout = LayoutRules(tuple(rules.items()))
    assert LayoutRules.from_text(str(layout)) == layout
    assert all(layout.axis(dim) == axis for dim, axis in rules.items())


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    mesh = Mesh(tuple((f"axis{i}", size) for i, size in enumerate(sizes)))
    num_dims = draw(st.integers(0, 3))
    places = [*mesh.axis_names, *[None] * num_dims]
    axes = draw(st.permutations(places))[:num_dims]
    factors = draw(st.lists(st.integers(0, 2), min_size=num_dims, max_size=num_dims))
    shape = Shape(
        tuple(
            Dim(f"d{i}", factor * (mesh.size(axis) if axis else 1))
            for i, (factor, axis) in enumerate(zip(factors, axes, strict=True))
        )
    )
    return TensorLayout(shape, mesh, tuple(axes))


@given(layouts())
def test_slices_cover_every_element_as_often_as_there_are_copies(layout):
    count = np.zeros(layout.shape.sizes, int)
    for processor in range(layout.mesh.num_devices):
        held = layout.slice_ranges(processor)
        assert count[held].shape == layout.slice_shape
        count[held] += 1
    copies = layout.mesh.num_devices
    for axis in layout.split_axes:
        copies //= layout.mesh.size(axis)
    assert (count == copies).all()


@given(st.lists(st.integers(1, 4), max_size=3))
def test_processors_are_numbered_row_by_row(sizes):
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    numbers = np.arange(mesh.num_devices).reshape(sizes)
    for where in itertools.product(*map(range, sizes)):
        coordinates = dict(zip(mesh.axis_names, where, strict=True))
        assert mesh.processor(coordinates) == numbers[where]
        assert mesh.coordinates(int(numbers[where])) == coordinates


def test_each_stage_owns_the_sub_mesh_of_the_other_axes():
    mesh = Mesh.from_text("data:2;layers:2;model:2")
    assert str(mesh.stage_mesh) == "data:2;model:2"
    assert [mesh.stage_processors(s) for s in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert Mesh.from_text("layers:2").stage_mesh.num_devices == 1
