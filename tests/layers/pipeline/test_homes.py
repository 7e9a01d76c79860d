"""Where the stages of a stack lie."""

import types

import pytest

from pipemesh.errors import LayoutError, MeshError, PipelineError, PlanError
from pipemesh.layers import mesh_cluster
from pipemesh.layers.pipeline.homes import mesh_of, stage_homes, warn_of_places
from pipemesh.mesh import LayoutRules, Mesh


def params(mesh_shape=None, layout=None, allow_idle=False):
    return types.SimpleNamespace(
        name="stack", mesh_shape=mesh_shape, layout=layout, allow_idle=allow_idle
    )


class Split:
    """A cluster that is no mesh, whose model split has some devices."""

    job = "trainer_client"

    def __init__(self, number):
        self.num_devices_per_split = number

    def WorkerDeviceInModelSplit(self, index):
        return f"D{index % self.num_devices_per_split}"


def devices(cluster, places, **kwargs):
    return [home.devices for home in stage_homes(cluster, places, params(**kwargs))]


def test_without_a_mesh_each_place_is_a_device_and_they_begin_anew():
    assert devices(Split(2), range(3)) == [("D0",), ("D1",), ("D0",)]
    assert devices(Split(3), [2, 0]) == [("D2",), ("D0",)]


def test_processors_of_a_mesh_are_the_devices_of_the_split_in_order():
    kwargs = {"mesh_shape": "layers:2;data:2", "layout": "batch:data"}
    assert devices(Split(4), range(2), **kwargs) == [("D0", "D1"), ("D2", "D3")]
    swapped = {"mesh_shape": "data:2;layers:2", "layout": "batch:data"}
    assert devices(Split(4), range(2), **swapped) == [("D0", "D2"), ("D1", "D3")]


def test_a_multiple_of_the_places_shares_them():
    assert devices(Split(2), range(4), mesh_shape="layers:2") == [("D0",), ("D1",)] * 2
    assert devices(Split(2), [0, 1, 1, 0], mesh_shape="layers:2") == [
        ("D0",),
        ("D1",),
        ("D1",),
        ("D0",),
    ]
    with pytest.raises(PipelineError, match=r"^stack: 3 stages need 3 places .* has 2, .*layers:3"):
        devices(Split(2), range(3), mesh_shape="layers:2")


def test_places_that_no_stage_uses_are_a_warning():
    with pytest.warns(UserWarning, match=r"^stack: mesh 'layers:4' has 4 places .* lie on 2: the"):
        warn_of_places(Split(4), range(2), params("layers:4"))
    assert devices(Split(4), range(2), mesh_shape="layers:4") == [("D0",), ("D1",)]


def test_a_split_with_too_few_devices_is_an_error():
    with pytest.raises(PipelineError, match=r"^stack: mesh_shape 'layers:4' has 4 .* split has 3"):
        devices(Split(3), range(4), mesh_shape="layers:4")


def test_what_params_ask_for_is_what_they_get():
    assert mesh_of(Split(1), params()) == (None, LayoutRules())
    mesh, rules = mesh_of(Split(1), params("layers:2;data:3", "batch:data"))
    assert mesh == Mesh.from_text("layers:2;data:3") and rules.axis("batch") == "data"
    mesh, rules = mesh_of(Split(1), params("layers:2;data:3", allow_idle=True))
    assert mesh == Mesh.from_text("layers:2;data:3") and rules == LayoutRules()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"mesh_shape": "layers"}, MeshError, ""),
        ({"layout": "batch:data"}, PipelineError, "but there is no mesh; set mesh_shape"),
        ({"mesh_shape": "layers:2", "layout": "batch:data"}, LayoutError, ""),
        ({"mesh_shape": "layers:2;data:2"}, PlanError, "nothing is split over the axis 'data'"),
    ],
)
def test_params_that_fit_nothing_are_errors_that_name_the_stack(kwargs, error, message):
    with pytest.raises(error, match=f"^stack: .*{message}"):
        mesh_of(Split(4), params(**kwargs))


def test_a_mesh_that_is_entered_is_the_one_of_the_stack():
    mesh, rules = Mesh.from_text("layers:2;data:2"), LayoutRules.from_text("batch:data")
    with mesh_cluster(mesh, layout=rules) as entered:
        assert mesh_of(entered, params()) == (mesh, rules)
        assert mesh_of(entered, params(str(mesh), str(rules))) == (mesh, rules)
        homes = stage_homes(entered, range(2), params())
        assert [len(home.devices) for home in homes] == [2, 2]
        assert len({device for home in homes for device in home.devices}) == 4
        with pytest.raises(PipelineError, match=r"^stack: mesh_shape is 'layers:2', .*one of them"):
            mesh_of(entered, params("layers:2"))
        with pytest.raises(PipelineError, match=r"^stack: layout is 'a:data', .*one of them"):
            mesh_of(entered, params(layout="a:data"))


def test_a_controller_which_computes_nothing_has_one_device_for_all():
    split = Split(1)
    split.job = "controller"
    kwargs = {"mesh_shape": "layers:2;data:2", "layout": "batch:data"}
    assert devices(split, range(2), **kwargs) == [("D0", "D0")] * 2


def test_homes_of_unequal_shape_lie_side_by_side():
    kwargs = {"mesh_shape": "layers:2;data:2;model:2,1", "layout": "batch:data;d_ff:model"}
    assert devices(Split(6), [0, 1, 1, 0], **kwargs) == [
        ("D0", "D1", "D2", "D3"),
        ("D4", "D5"),
        ("D4", "D5"),
        ("D0", "D1", "D2", "D3"),
    ]
    with pytest.raises(PipelineError, match=r"^stack: .* has 6 processors, .* has 5 devices"):
        devices(Split(5), range(2), **kwargs)
