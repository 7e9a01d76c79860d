"""The mesh and its text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import MeshError
from pipemesh.mesh import Mesh

NAMES = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(1, 64), min_size=1, max_size=4))
def test_text_parses_back(axes):
    mesh = Mesh(tuple(axes.items()))
    assert Mesh.from_text(str(mesh)) == mesh


def test_the_number_of_devices_is_the_product_of_the_sizes():
    assert Mesh.from_text("layers:4; data : 2").num_devices == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' in mesh shape '' is not name:size"),
        ("layers", "'layers' in mesh shape"),
        ("layers=2", "'layers=2'"),
        ("layers:2;", "'' in mesh shape 'layers:2;'"),
        ("layers:-2", "'layers:-2'"),
        ("layers:0", "axis 'layers' has size 0"),
        ("layers:2;layers:2", "'layers' is named twice"),
    ],
)
def test_malformed_text_names_the_part_that_is_wrong(text, message):
    with pytest.raises(MeshError, match=message):
        Mesh.from_text(text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: mesh.coordinates(8), "no processor 8; it has 0 to 7"),
        (lambda mesh: mesh.processor({"data": 2}), "no coordinate 2; it has 0 to 1"),
        (lambda mesh: mesh.processor({"dat": 0}), "no axis 'dat'; did you mean 'data'"),
        (lambda mesh: mesh.groups(["x"]), "no axis 'x'; known: 'layers', 'data'"),
        (lambda mesh: mesh.stage_processors(4), "no stage 4; it has 0 to 3"),
    ],
)
def test_what_a_mesh_does_not_have_is_named(call, message):
    with pytest.raises(MeshError, match=message):
        call(Mesh.from_text("layers:4;data:2"))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((("data", 2.0),), "'data' has size 2.0; sizes are whole"),
        ((("data", True),), "size True"),
        ((("data", 0),), "size 0"),
        (((1, 2),), "1 is no name of an axis"),
        ((("da ta", 2),), "'da ta' is no name of an axis"),
    ],
)
def test_axes_are_names_and_whole_sizes(axes, message):
    with pytest.raises(MeshError, match=message):
        Mesh(axes)
