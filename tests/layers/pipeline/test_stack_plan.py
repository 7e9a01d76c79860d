"""Plans of stacks."""

import dataclasses

import pytest
import tensorflow as tf
from lingvo.core import cluster_factory, layers, tshape

from pipemesh.errors import PipelineError, PlanError, ScheduleError
from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer, mesh_cluster
from pipemesh.layers.pipeline.stack_plan import checked_plan, set_plan, values_of
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Plan
from pipemesh.recurrent import Selective
from pipemesh.schedule import gpipe, interleaved_one_f_one_b, one_f_one_b, write_csv


def params(num_stages=2, **kwargs):
    cells = [layers.FetchLayer.Params().Set(name=f"s{i}") for i in range(num_stages)]
    return PipeliningLayer.Params().Set(
        **{"name": "stack", "cell_tpl": cells, "num_micro_batches": 4, **kwargs}
    )


def table_of(*args, **kwargs):
    return checked_plan(params(*args, **kwargs), cluster_factory.Current()).table


def test_a_schedule_is_a_name_a_table_or_a_file(tmp_path):
    assert table_of() == gpipe(2, 4)
    found = table_of(4, schedule="interleaved:2", loss_inside=True)
    assert found == interleaved_one_f_one_b(2, 4, 2)
    table = gpipe(2, 4)
    assert table_of(schedule=table) is table
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(one_f_one_b(2, 4)), encoding="utf-8")
    assert table_of(schedule=f"file:{path}", loss_inside=True) == one_f_one_b(2, 4)
    with pytest.raises(
        PipelineError, match=r"the schedule has 2 stages .* there are 3 in cell_tpl"
    ):
        table_of(3, schedule=f"file:{path}", loss_inside=True)


def test_a_plan_is_set_whole():
    plan = Plan(
        "layers:2;data:2",
        "batch:data",
        "zb_h1",
        num_microbatches=4,
        remat="none,full",
        compute_dtype="bfloat16",
    )
    p = PipeliningLayer.ForPlan(plan, name="stack", cell_tpl=params().cell_tpl, loss_inside=True)
    found = checked_plan(p, cluster_factory.Current())
    assert dataclasses.replace(found, boundaries=None) == plan
    assert values_of(p) == {n: t for n, t in plan.to_values().items() if n in values_of(p)}
    assert (p.mesh_shape, p.layout) == ("layers:2;data:2", "batch:data")
    idle = dataclasses.replace(plan, mesh="layers:2;data:2;model:2", allow_idle=True)
    assert PipeliningLayer.ForPlan(idle).allow_idle and not p.allow_idle


def test_some_values_of_a_plan_are_set():
    p = params(remat="none")
    set_plan(p, Plan("layers:2", schedule="zb_h1", num_microbatches=8), {"num_microbatches": "8"})
    assert (p.num_micro_batches, p.schedule, p.remat) == (8, "gpipe", "none")


INSIDE = {"loss_inside": True}


@pytest.mark.parametrize(
    ("num_stages", "kwargs", "message"),
    [
        (0, {}, "cell_tpl is empty"),
        (2, {"num_micro_batches": 0}, "num_micro_batches is 0"),
        (2, {"micro_batch_size": 0}, "micro_batch_size is 0"),
        (2, {"remat": "ful"}, "remat is 'ful'; allowed are full, none, "),
        (2, {"batch_dim": -1}, "batch_dim is -1"),
        (2, {"pipelined": None}, "pipelined is None; it must be True or False$"),
        (2, {"loop": 1}, "loop is 1; it must be True, False or None"),
        (2, {"strict_devices": "no"}, "strict_devices is 'no'; it must be True or"),
        (2, {"loss_inside": "no"}, "loss_inside is 'no'; it must be True or False"),
        (2, {"compile": True, "pipelined": False}, "without a pipeline no stage is compiled"),
        (2, {"nested_map_fprop": "no"}, "nested_map_fprop is 'no'; it must be True"),
        (2, {"state_dtype": tf.int32}, "state_dtype is"),
        (2, {**INSIDE, "nested_map_fprop": True}, "with loss_inside the last layer returns sca"),
        (
            2,
            {"pipelined": False, "fprop_dtype": tf.float16},
            ".*the loss is not scaled, which float16 needs",
        ),
        (
            3,
            {"schedule": "interleaved:2", **INSIDE},
            r"schedule 'interleaved:2' has 2 stages a device, .* cut the layers into 2 stages",
        ),
        (1, {"schedule": "interleaved:2", **INSIDE}, "schedule 'interleaved:2' .* into 2 stages"),
        (3, {"schedule": gpipe(2, 4)}, "the schedule has 2 stages and 4 micro"),
        (2, {"schedule": gpipe(2, 8)}, ".*2 stages and 8 microbatches, .* is 4"),
    ],
)
def test_params_that_contradict_are_errors(num_stages, kwargs, message):
    with pytest.raises(PipelineError, match=f"^stack: {message}"):
        table_of(num_stages, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"schedule": "nonsense"}, ScheduleError, ".*1f1b"),
        ({"schedule": "1f1b"}, ScheduleError, "schedule '1f1b' starts backward .*loss_inside=Tr"),
        ({"schedule": one_f_one_b(2, 4)}, ScheduleError, "its schedule starts backward passes"),
    ],
)
def test_schedules_that_stacks_cannot_run_are_errors(kwargs, error, message):
    with pytest.raises(error, match=f"^stack: {message}"):
        table_of(**kwargs)


def stack(num_stages, num_layers=6, **values):
    dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
    cells = PartitionSequentialLayers([dense] * num_layers, num_stages, tshape.Shape([8, 4]))
    return PipeliningLayer.Params().Set(name="stack", cell_tpl=cells, **values)


def plan_on(mesh, layout, params):
    with mesh_cluster(Mesh.from_text(mesh), layout=LayoutRules.from_text(layout)):
        return params.Instantiate().plan


def test_it_has_the_mesh_of_the_cluster_and_the_rest_of_the_params(eagerly):
    params = stack(2, schedule="zb_h1", num_micro_batches=4, loss_inside=True, remat="none").Set(
        fprop_dtype="bfloat16"
    )
    plan = plan_on("layers:2;data:2", "batch:data", params)
    assert str(plan) == (
        "mesh=layers:2;data:2 layout=batch:data schedule=zb_h1 num_microbatches=4 "
        "boundaries=0,3,6 remat=none compute_dtype=bfloat16"
    )
    assert Plan.from_text(str(plan)) == plan


def test_params_and_cluster_give_the_same_plan(eagerly):
    of_cluster = plan_on("layers:2;data:2", "batch:data", stack(2))
    given = stack(2, mesh_shape="layers:2;data:2", layout="batch:data")
    assert plan_on("layers:2;data:2", "batch:data", given) == of_cluster


def test_without_a_mesh_each_device_of_the_schedule_is_a_place(eagerly):
    layer = stack(4, schedule="looped_bfs:2", num_micro_batches=2).Instantiate()
    assert str(layer.plan.mesh) == "layers:2" and layer.plan.num_stages == 4


def test_places_of_unequal_shape_start_again_where_the_schedule_has_more(eagerly):
    with (
        pytest.warns(UserWarning, match=r"split along model: .* Use the mesh 'layers:2;data:2'"),
        pytest.warns(UserWarning, match="each place takes 2 in turn"),
    ):
        plan = plan_on("layers:2;data:2;model:2,1", "batch:data", stack(4, num_micro_batches=4))
    assert str(plan.mesh) == "layers:4;data:2;model:2,1,2,1"


def test_what_only_python_knows_has_a_name(eagerly):
    table = one_f_one_b(2, 4)
    params = stack(2, schedule=table, num_micro_batches=4, loss_inside=True)
    plan = plan_on("layers:2", "", params.Set(remat=Selective(lambda layer: True)))
    assert plan.remat.is_custom and plan.schedule == table
    assert Plan.from_text(str(plan)).table == table


def test_a_place_may_be_shared_and_an_axis_may_idle(eagerly):
    with pytest.warns(UserWarning, match="will idle"):
        plan = plan_on("layers:1;model:2", "", stack(3))
    assert str(plan.mesh) == "layers:3;model:2" and plan.allow_idle
    with pytest.raises(PlanError, match="'model'"):
        dataclasses.replace(plan, allow_idle=False)
