"""Which device a stage gets from a mesh, and what is said of devices that idle."""

import warnings

import pytest
import tensorflow as tf
from lingvo.core import cluster_factory, layers

from pipemesh.errors import MeshError, PipelineError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer, mesh_cluster
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
