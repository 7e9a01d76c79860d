"""Clusters of meshes, and homes."""

import types
import warnings

import pytest
import tensorflow as tf
from lingvo.core import cluster_factory, layers

from pipemesh.errors import LayoutError, MeshError, PipelineError, PlanError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer, mesh_cluster
from pipemesh.layers.mesh_cluster import mesh_of, stage_homes, warn_of_places
from pipemesh.mesh import LayoutRules, Mesh


def device_numbers(text, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = mesh_cluster(Mesh.from_text(text))
    names = [cluster.WorkerDeviceInModelSplit(i) for i in range(count)]
    return [tf.DeviceSpec.from_string(name).device_index for name in names]


def stack(cls, num_stages, **kwargs):
    dense = layers.FCLayer.Params().Set(input_dim=2, output_dim=2)
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=[dense.Copy().Set(name=f"l{i}")])
        for i in range(num_stages)
    ]
    return cls.Params().Set(name="stack", cell_tpl=cells, **kwargs)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("layers:3", [0, 1, 2]),
        ("layers:2;model:2", [0, 2]),
        ("data:2;layers:2", [0, 1]),
        ("data:2;layers:2;model:2", [0, 2]),
        ("layers:4;data:2", [0, 2, 4, 6]),
    ],
)
def test_a_stage_lies_on_the_first_device_of_its_home(text, devices):
    mesh = Mesh.from_text(text)
    assert devices == [mesh.stage_processors(i)[0] for i in range(mesh.num_stages)]
    assert device_numbers(text, len(devices)) == devices


def test_copies_that_lingvo_makes_of_the_cluster_know_the_mesh():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = mesh_cluster(Mesh.from_text("layers:2;model:2"))
    with cluster, cluster_factory.SetEval(mode=True), cluster_factory.SetModelSplit(0) as copied:
        assert copied.do_eval
        assert copied.WorkerDeviceInModelSplit(1).endswith("CPU:2")


def test_devices_that_idle_are_named():
    with pytest.warns(
        UserWarning, match=r"CPU:1, CPU:3 will idle.*'layers:2', or split.*'batch:model', .* 4 sta"
    ):
        mesh_cluster(Mesh.from_text("layers:2;model:2"))
    split = LayoutRules.from_text("batch:data")
    with pytest.warns(UserWarning, match=r"CPU:1, CPU:3 will idle. Use .*;data:2', or cut .* 2 st"):
        mesh_cluster(Mesh.from_text("layers:1;data:2;model:2"), layout=split)


def test_a_mesh_without_layers_is_an_error():
    with pytest.raises(MeshError, match=r"'data:2' has no axis 'layers'.*'layers:2'"):
        mesh_cluster(Mesh.from_text("data:2"))
    mesh_cluster(Mesh.from_text("data:1"))
    # A single stage on all of them.
    mesh_cluster(Mesh.from_text("data:2"), layout=LayoutRules.from_text("batch:data"))


def test_what_is_no_mesh_is_an_error():
    with pytest.raises(MeshError, match=r"'layers:2' is no Mesh; write Mesh.from_text"):
        mesh_cluster("layers:2")


@pytest.mark.parametrize("cls", [SeqLayer, PipeliningLayer])
def test_stages_that_the_places_cannot_share_evenly_are_an_error(eagerly, cls):
    with mesh_cluster(Mesh.from_text("layers:2")):
        with pytest.raises(PipelineError, match=r"3 stages need 3 places.*'layers:2' has 2, and"):
            stack(cls, 3).Instantiate()


def test_a_schedule_with_two_stages_a_device_needs_half_the_places(eagerly):
    with mesh_cluster(Mesh.from_text("layers:2")):
        params = stack(PipeliningLayer, 4, num_micro_batches=2, schedule="zb_v", loss_inside=True)
        layer = params.Instantiate()
        assert [device[-1] for device in layer.StageDevices()] == ["0", "1", "1", "0"]


def test_fewer_stages_than_places_are_a_warning(eagerly):
    with mesh_cluster(Mesh.from_text("layers:4")):
        with pytest.warns(UserWarning, match="has 4 places .* its 2 stages lie on 2"):
            stack(PipeliningLayer, 2).Instantiate()


@pytest.mark.filterwarnings("ignore:.*each place takes 2 in turn")
@pytest.mark.parametrize(("text", "wanted"), [("layers:1", "0000"), ("layers:2", "0101")])
def test_a_multiple_of_the_places_shares_them(eagerly, text, wanted):
    with mesh_cluster(Mesh.from_text(text)):
        devices = stack(PipeliningLayer, 4, num_micro_batches=2).Instantiate().StageDevices()
    assert "".join(device[-1] for device in devices) == wanted


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


def test_stages_share_places_in_turn():
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
