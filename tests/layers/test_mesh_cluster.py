"""Clusters of meshes, and homes."""

import types
import warnings

import pytest
import tensorflow as tf
from lingvo.core import cluster_factory, layers

from pipemesh.errors import LayoutError, MeshError, PipelineError, PlanError
from pipemesh.layers import mesh_cluster
from pipemesh.layers.mesh_cluster import mesh_of, stage_homes, warn_of_places
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.stacks import stack_of


def device_numbers(text, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = mesh_cluster(Mesh.from_text(text))
    names = [cluster.WorkerDeviceInModelSplit(i) for i in range(count)]
    return [tf.DeviceSpec.from_string(name).device_index for name in names]


def homes_of(mesh, **kwargs):
    """The first device of each of four stages."""
    dense = layers.FCLayer.Params().Set(input_dim=2, output_dim=2)
    sub = [dense.Copy().Set(name=f"l{i}") for i in range(4)]
    with mesh_cluster(Mesh.from_text(mesh)):
        layer = stack_of(sub, range(5), num_micro_batches=2, **kwargs).Instantiate()
        return "".join(home.first[-1] for home in layer.StageHomes())


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
    with pytest.raises(MeshError, match=r"'layers:2' is no Mesh; write Mesh.from_text"):
        mesh_cluster("layers:2")


@pytest.mark.filterwarnings("ignore:.*each place takes 2 in turn")
def test_stages_share_devices_by_their_schedule_or_in_turn(eagerly):
    assert homes_of("layers:2", schedule="zb_v", loss_inside=True) == "0110"
    assert homes_of("layers:1") == "0000"
    assert homes_of("layers:2") == "0101"


def params(mesh_shape=None, layout=None, allow_idle=False):
    return types.SimpleNamespace(
        name="stack", mesh_shape=mesh_shape, layout=layout, allow_idle=allow_idle
    )


def split(number, job="trainer_client"):
    """A cluster of lingvo's own whose model split has some devices."""
    p = cluster_factory.Current().params.Copy().Set(mode="sync", job=job)
    p.worker.Set(name="/job:localhost", replicas=1, gpus_per_replica=0)
    p.worker.Set(cpus_per_replica=number, devices_per_split=number)
    return cluster_factory.Cluster(p)


def devices(cluster, places, mesh_shape=None, layout=None):
    homes = stage_homes(cluster, places, params(mesh_shape, layout))
    return " ".join("".join(device[-1] for device in home.devices) for home in homes)


UNEQUAL = ("layers:2;data:2;model:2,1", "batch:data;d_ff:model")


@pytest.mark.parametrize(
    ("number", "places", "mesh", "wanted"),
    [
        # Without a mesh each place is a device, and they begin anew.
        (2, range(3), (), "0 1 0"),
        (3, [2, 0], (), "2 0"),
        (4, range(2), ("layers:2;data:2", "batch:data"), "01 23"),
        (4, range(2), ("data:2;layers:2", "batch:data"), "02 13"),
        (2, range(4), ("layers:2",), "0 1 0 1"),
        (2, [0, 1, 1, 0], ("layers:2",), "0 1 1 0"),
        (4, range(2), ("layers:4",), "0 1"),
        (6, [0, 1, 1, 0], UNEQUAL, "0123 45 45 0123"),
    ],
)
def test_homes_are_the_devices_of_the_split_in_order(number, places, mesh, wanted):
    assert devices(split(number), places, *mesh) == wanted


@pytest.mark.parametrize(
    ("number", "places", "mesh", "message"),
    [
        (2, range(3), ("layers:2",), "3 stages need 3 places .* has 2, .*layers:3"),
        (3, range(4), ("layers:4",), "mesh_shape 'layers:4' has 4 .* split has 3"),
        (5, range(2), UNEQUAL, ".* has 6 processors, .* has 5 devices"),
    ],
)
def test_splits_that_do_not_fit_are_errors(number, places, mesh, message):
    with pytest.raises(PipelineError, match=f"^stack: {message}"):
        devices(split(number), places, *mesh)


def test_places_that_no_stage_uses_are_a_warning():
    with pytest.warns(UserWarning, match=r"^stack: mesh 'layers:4' has 4 places .* lie on 2: the"):
        warn_of_places(split(4), range(2), params("layers:4"))


def test_what_params_ask_for_is_what_they_get():
    assert mesh_of(split(1), params()) == (None, LayoutRules())
    mesh, rules = mesh_of(split(1), params("layers:2;data:3", "batch:data"))
    assert mesh == Mesh.from_text("layers:2;data:3") and rules.axis("batch") == "data"
    mesh, rules = mesh_of(split(1), params("layers:2;data:3", allow_idle=True))
    assert mesh == Mesh.from_text("layers:2;data:3") and rules == LayoutRules()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"mesh_shape": "layers"}, MeshError, ""),
        ({"layout": "batch:data"}, PipelineError, "but there is no mesh; set mesh_shape"),
        ({"mesh_shape": "layers:2", "layout": "batch:data"}, LayoutError, ""),
        ({"mesh_shape": "layers:2;data:2", "layout": "batch:dta"}, LayoutError, "mean 'data'"),
        ({"mesh_shape": "layers:2", "layout": "batch:layers"}, LayoutError, "along which the stag"),
        ({"mesh_shape": "layers:2;data:2"}, PlanError, "nothing is split over the axis 'data'"),
    ],
)
def test_params_that_fit_nothing_are_errors_that_name_the_stack(kwargs, error, message):
    with pytest.raises(error, match=f"^stack: .*{message}"):
        mesh_of(split(4), params(**kwargs))


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
    controller = split(1, "controller")
    assert devices(controller, range(2), "layers:2;data:2", "batch:data") == "00 00"
