"""The processors that own a stage."""

import contextlib

import pytest

from pipemesh.errors import LayoutError, MeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Plan, homes

BY_DATA = LayoutRules.from_text("batch:data")


def mesh(text):
    return Mesh.from_text(text)


@pytest.mark.parametrize(
    ("rules", "lowering", "told"),
    [
        ("batch:layers", "placement", "'batch:layers' splits the batch over the axis 'layers'"),
        ("batch:layers", "simd", "splits the batch over the axis 'layers'"),
        (
            "d_ff:layers",
            "placement",
            "splits the dim 'd_ff' over the axis 'layers', along which the stages lie",
        ),
        ("", "placement", ""),
        ("batch:data", "placement", ""),
        ("batch:data;embed:data;d_ff:model", "placement", ""),
        ("vocab:layers;batch:data;heads:model", "simd", ""),
    ],
)
def test_stages_are_not_split_over_their_own_axis(rules, lowering, told):
    """Under simd dims other than the batch may be."""
    raised = pytest.raises(LayoutError, match=told) if told else contextlib.nullcontext()
    with raised:
        homes.check_axes(LayoutRules.from_text(rules), lowering)


@pytest.mark.parametrize(
    ("text", "layout", "number"),
    [
        ("layers:2;data:3", "batch:data", 3),
        ("layers:2;data:3", "", 1),
        ("layers:2;data:3;model:4", "hidden:data;batch:model", 4),
    ],
)
def test_replicas_are_the_places_of_the_batchs_axis(text, layout, number):
    assert homes.num_replicas(mesh(text), LayoutRules.from_text(layout)) == number


@pytest.mark.parametrize(
    ("text", "layout", "of_each_place"),
    [
        ("layers:2;data:3", "batch:data", [[0, 1, 2], [3, 4, 5]]),
        ("data:3;layers:2", "batch:data", [[0, 2, 4], [1, 3, 5]]),
        ("layers:2;data:2;model:2", "batch:data", [[0, 2], [4, 6]]),
        ("layers:2;data:2;model:2", "batch:data;hidden:model", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("model:2;data:2", "batch:data;hidden:model", [[0, 2, 1, 3]]),
        ("layers:2;data:2;model:2", "batch:model", [[0, 1], [4, 5]]),
        ("layers:2;data:2", "", [[0], [2]]),
        ("data:2", "batch:data", [[0, 1]]),
    ],
)
def test_homes_of_stages(text, layout, of_each_place):
    rules = LayoutRules.from_text(layout)
    found = [homes.home_of(mesh(text), rules, i) for i in range(len(of_each_place))]
    assert found == of_each_place


def test_unused_axes():
    whole = mesh("layers:2;data:3;model:4;one:1")
    assert homes.unused_axes(whole, LayoutRules()) == ["data", "model"]
    assert homes.unused_axes(whole, LayoutRules.from_text("hidden:data")) == ["model"]
    assert homes.unused_axes(mesh("layers:2;one:1"), LayoutRules()) == []


def test_devices_may_not_idle():
    homes.check_no_idle_axis(mesh("layers:2;data:3"), BY_DATA)
    with pytest.raises(PlanError, match=r"axis 'data' of mesh 'layers:2;data:3'.*; add a rule"):
        homes.check_no_idle_axis(mesh("layers:2;data:3"), LayoutRules())
    with pytest.raises(PlanError, match=r"axis 'model' .* or compute the same; leave the axis out"):
        homes.check_no_idle_axis(mesh("layers:2;data:3;model:2"), BY_DATA)
    with pytest.raises(PlanError, match=r"compute the same; leave the axis out"):
        homes.check_no_idle_axis(mesh("layers:2;model:2,1"), LayoutRules())


def test_inner_mesh_has_the_axes_of_other_dims():
    whole = mesh("model:2;layers:2;data:2;idle:1")
    rules = LayoutRules.from_text("batch:data;d_ff:model;heads:model")
    assert str(homes.inner_mesh(whole, rules)) == "model:2"
    assert str(homes.inner_rules(rules)) == "d_ff:model;heads:model"
    assert homes.inner_mesh(whole, BY_DATA) is None
    rules = LayoutRules.from_text("vocab:layers;batch:data;heads:model")
    whole = mesh("layers:2;data:2;model:2")
    assert str(homes.inner_mesh(whole, rules)) == "model:2"
    assert str(homes.inner_rules(rules)) == "heads:model"


def test_dims_split_along_the_batch_axis_are_weights():
    whole = mesh("model:2;layers:2;data:2")
    rules = LayoutRules.from_text("batch:data;embed:data;d_ff:model")
    assert str(homes.cut_rules(rules)) == "embed:data"
    assert str(homes.inner_rules(rules)) == "d_ff:model"
    assert str(homes.inner_mesh(whole, rules)) == "model:2"
    assert homes.replica_axis(whole, rules) == ("data", 2)
    assert homes.home_of(whole, rules, 1) == [2, 6, 3, 7]
    for text in ("d_ff:model", "batch:rows"):
        assert homes.replica_axis(mesh("model:2;rows:1"), LayoutRules.from_text(text)) is None


def test_homes_may_differ_inside_a_replica():
    whole = mesh("layers:2;data:2;model:2,1")
    rules = LayoutRules.from_text("batch:data;d_ff:model")
    homes.check_uneven(whole, rules)
    assert [str(homes.inner_mesh(whole, rules, place)) for place in (0, 1)] == [
        "model:2",
        "model:1",
    ]
    assert [homes.home_of(whole, rules, place) for place in (0, 1)] == [[0, 1, 2, 3], [4, 5]]
    assert homes.unused_axes(whole, BY_DATA) == ["model"]
    assert homes.num_replicas(whole, rules) == 2


@pytest.mark.parametrize(
    ("text", "rules", "lowering", "error", "message"),
    [
        (
            "layers:2;data:2,1",
            "batch:data",
            "placement",
            LayoutError,
            "batch is split over .*'data'",
        ),
        (
            "layers:2;data:2;model:2,1",
            "batch:data;embed:data;d_ff:model",
            "placement",
            LayoutError,
            "rule 'embed:data' cuts weights",
        ),
        ("layers:2;model:2,1", "d_ff:model", "simd", MeshError, "lowering='simd' is one program"),
    ],
)
def test_unsupported_uneven_homes_are_errors(text, rules, lowering, error, message):
    layout = LayoutRules.from_text(rules)
    with pytest.raises(error, match=message):
        homes.check_uneven(mesh(text), layout, lowering)
    with pytest.raises(error, match=message):
        Plan(mesh(text), layout, num_microbatches=2, lowering=lowering)
    homes.check_uneven(mesh("layers:2;data:2;model:2"), layout, lowering)
