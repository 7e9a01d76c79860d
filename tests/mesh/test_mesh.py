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


def test_blanks_in_a_text_do_not_matter():
    assert str(Mesh.from_text("layers:4; data : 2")) == "layers:4;data:2"


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
        ("layers:2;model:4,1,1", "'model' .* has 3 sizes, but the number of places .* is 2; give"),
        ("model:4,1", "has 2 sizes, but the number of places along the axis 'layers' is 1"),
        ("layers:2,1;model:2", "axis 'layers' of mesh 'layers:2,1;model:2' has several sizes"),
        ("layers:2;model:4,0", "axis 'model' has size 4,0; sizes are whole"),
        ("layers:2;model:4,", "'model:4,' in mesh shape"),
    ],
)
def test_malformed_text_names_the_part_that_is_wrong(text, message):
    with pytest.raises(MeshError, match=message):
        Mesh.from_text(text)


EVEN, UNEVEN = Mesh.from_text("layers:4;data:2"), Mesh.from_text("layers:2;model:4,1")
SEVERAL = r"several sizes, one for each place along 'layers'.*one size"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mesh((("data", 2.0),)), "'data' has size 2.0; sizes are whole"),
        (lambda: Mesh((("data", 0),)), "size 0"),
        (lambda: Mesh(((1, 2),)), "1 is no name of an axis"),
        (lambda: Mesh((("da ta", 2),)), "'da ta' is no name of an axis"),
        (lambda: EVEN.coordinates(8), "no processor 8; it has 0 to 7"),
        (lambda: EVEN.processor({"data": 2}), "no coordinate 2; it has 0 to 1"),
        (lambda: EVEN.processor({"dat": 0}), "no axis 'dat'; did you mean 'data'"),
        (lambda: EVEN.groups(["x"]), "no axis 'x'; known: 'layers', 'data'"),
        (lambda: EVEN.stage_processors(4), "no stage 4; it has 0 to 3"),
        (lambda: UNEVEN.size("model"), SEVERAL),
        (lambda: UNEVEN.shape, SEVERAL),
        (lambda: UNEVEN.stage_mesh, SEVERAL),
        (lambda: UNEVEN.stride("layers"), SEVERAL),
    ],
)
def test_what_a_mesh_cannot_have_is_named(call, message):
    with pytest.raises(MeshError, match=message):
        call()


def test_an_axis_may_have_a_size_for_each_place_along_layers():
    mesh = Mesh.from_text("layers:3;data:2;model:2,1, 4")
    assert str(mesh) == "layers:3;data:2;model:2,1,4" and Mesh.from_text(str(mesh)) == mesh
    assert (mesh.is_even, mesh.num_devices, mesh.num_stages, mesh.size("data")) == (False, 14, 3, 2)
    places = [mesh.stage_processors(i) for i in range(3)]
    assert places == [(0, 1, 2, 3), (4, 5), (*range(6, 14),)]
    assert [str(mesh.place_mesh(i)) for i in (0, 1)] == ["data:2;model:2", "data:2;model:1"]
    assert mesh.coordinates(5) == {"layers": 1, "data": 1, "model": 0}
    assert mesh.coordinates(12) == {"layers": 2, "data": 1, "model": 2}
    assert mesh.groups(["model"])[:3] == ((0, 1), (2, 3), (4,))


def test_equal_sizes_are_one_size():
    mesh = Mesh.from_text("layers:2;model:3,3")
    assert mesh == Mesh.from_text("layers:2;model:3") and mesh.is_even
    assert mesh.place_mesh(1) == mesh.stage_mesh
