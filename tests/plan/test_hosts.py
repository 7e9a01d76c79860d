"""Which processor lies on which host."""

import pytest

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.hosts import over_hosts


def places(mesh, layout, devices):
    return over_hosts(Mesh.from_text(mesh), LayoutRules.from_text(layout), devices)


@pytest.mark.parametrize("mesh", ["layers:2;model:2", "model:2;layers:2"])
def test_slices_lie_on_one_host_however_the_axes_are_ordered(mesh):
    found = places(mesh, "d_ff:model", [2, 2])
    assert found.crossing == ()
    shape = Mesh.from_text(mesh)
    for stage in range(2):
        assert {found.places[p][0] for p in shape.stage_processors(stage)} == {stage}


def test_replicas_rather_than_slices_lie_on_several_hosts():
    found = places("model:2;data:2", "batch:data;d_ff:model", [2, 2])
    assert found.crossing == ()
    # Processors 0 and 2 differ in `model`.
    hosts = [host for host, _ in found.places]
    assert hosts == [0, 1, 0, 1]


def test_an_axis_inside_of_a_replica_that_crosses_hosts_is_named():
    assert places("layers:2;model:2", "d_ff:model", [1, 1, 1, 1]).crossing == ("model",)
    assert places("layers:1;model:2;seq:2", "d_ff:model;t:seq", [2, 2]).crossing == ("model",)


def test_every_device_has_one_processor():
    found = places("layers:3;data:2", "batch:data", [3, 3])
    assert len(set(found.places)) == 6


def test_hosts_have_as_many_as_they_can():
    assert [h for h, _ in places("layers:4", "", [1, 8]).places] == [0, 1, 1, 1]
    assert [h for h, _ in places("layers:3", "", [4, 4]).places] == [0, 0, 1]
    assert places("layers:2", "", [4, 4, 4]).idle == (2,)


def test_homes_of_different_sizes_lie_side_by_side():
    found = over_hosts(
        Mesh.from_text("layers:2;model:1,3"), LayoutRules.from_text("d_ff:model"), [2, 2]
    )
    assert len(set(found.places)) == 4
    assert found.crossing == ("model",)


def test_too_few_devices_are_an_error():
    with pytest.raises(PlanError, match="it has 4 processors, but 2 workers have 3 devices"):
        places("layers:4", "", [1, 2])
