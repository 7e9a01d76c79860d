"""The best change of a plan is found, it fits, and it is one that a training takes."""

import shlex

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, Prediction, predict
from pipemesh.plan.figures import figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.report.change import Change, changes
from pipemesh.report.change.changes import best, best_of_each

BATCH = 16


def figures(seconds=(1.0,) * 6, **more):
    costs = [
        LayerCost(s, backward=2 * s, parameter_bytes=8.0, activation_bytes=4.0, boundary_bytes=2.0)
        for s in seconds
    ]
    return Figures(tuple(figures_of_costs(costs, 1)), **{"action": 0.01} | more)


def named(plan, found, batch=BATCH, **more):
    every = changes(plan, found, batch, **{"knows_links": False} | more)
    return best(every, predict(plan, found, batch).seconds)


def test_too_few_microbatches_are_named():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    found = named(plan, figures(), knows_layers=False)
    assert found.kind == "microbatches" and found.flags == "--num_microbatches=16"
    every = changes(plan, figures(), BATCH, knows_links=False)
    tried = {e.values["num_microbatches"] for e in every if e.kind == "microbatches"}
    assert tried == {"1", "4", "8", "16"}
    now = predict(plan, figures(), BATCH).seconds
    assert found.prediction.seconds < 0.75 * now


def test_of_what_was_not_measured_nothing_far_is_tried_and_it_is_said():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    every = changes(plan, figures(), BATCH, knows_rows=False, knows_halves=False)
    tried = {e.values["num_microbatches"] for e in every if e.kind == "microbatches"}
    assert tried == {"1", "4", "8"}
    for each in every:
        halves = each.values.get("schedule", "").startswith(("zb", "v_"))
        assert ("halves" in each.supposed) == halves
        assert ("rows" in each.supposed) == (each.kind == "microbatches")
        assert ("parts" in each.supposed) == (each.prediction.plan.num_stages > 2)


def test_a_bad_cut_is_named_and_mended():
    plan = Plan("layers:2", num_microbatches=64, boundaries=(0, 5, 6), remat="none")
    # Of other schedules that cut anew some are shorter by a little, and say more.
    found = named(plan, figures(), 64)
    assert (found.kind, found.flags) == ("cuts", "--boundaries=0,3,6")
    # Of whole stages nothing can be cut anew.
    assert "cuts" not in {e.kind for e in changes(plan, figures(), BATCH, knows_layers=False)}


def test_what_is_computed_again_is_named():
    plan = Plan("layers:2", num_microbatches=16, boundaries=(0, 3, 6), remat="full")
    found = named(plan, figures())
    assert (found.kind, found.flags) == ("remat", "--remat=none")
    now = predict(plan, figures(), BATCH).seconds
    assert found.prediction.seconds == pytest.approx(0.75 * now, rel=0.02)


def test_of_changes_that_help_alike_the_simplest_is_named():
    plan = Plan("layers:1", num_microbatches=4, boundaries=(0, 6))

    def change(seconds, supposed="", **values):
        return Change("schedule", values, Prediction(seconds, 0.0, (1.0,), plan=plan), supposed)

    both = change(7.9, schedule="zb_v", boundaries="0,1")
    one, other = change(8.0, remat="none"), change(8.2, remat="none")
    assert best([both, one], 10.0) is one and best([both, other], 10.0) is both
    # What is supposed may be wrong.
    supposed, little = change(7.9, "halves", schedule="zb_h1"), change(9.0, remat="none")
    assert best([supposed, other], 10.0) is other and best([supposed, little], 10.0) is supposed
    assert best([supposed, change(11.0, remat="none")], 10.0) is supposed
    assert best([change(10.5, "halves"), change(11.0)], 10.0).prediction.seconds == 10.5


def test_a_schedule_is_named_where_it_is_what_is_left():
    plan = Plan("layers:4", num_microbatches=16, boundaries=(0, 2, 3, 4, 6), remat="none")
    found = named(plan, figures((0.5, 0.5, 1.0, 1.0, 0.5, 0.5)))
    assert found.kind == "schedule" and found.values["schedule"].startswith("z")
    assert found.prediction.seconds < predict(plan, figures(), BATCH).seconds


def test_layers_are_cut_anew_where_a_schedule_has_other_stages():
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    every = changes(plan, figures(), BATCH)
    (looped,) = [e for e in every if e.values.get("schedule") == "interleaved:2"]
    assert looped.prediction.plan.num_stages == 4
    assert looped.flags.startswith("--schedule=interleaved:2 --boundaries=0,")
    assert Plan.from_values(plan.to_values() | dict(looped.values)) == looped.prediction.plan


def test_fewer_stages_and_more_replicas_are_tried_where_links_are_known():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    slow, fast = (figures(transfer=Link(0.0, rate)) for rate in (1.0, 1e9))
    meshes = {e.values["mesh"]: e for e in changes(plan, fast, BATCH) if e.kind == "mesh"}
    assert set(meshes) == {"layers:1;data:2"}
    (found,) = meshes.values()
    assert "'--mesh_shape=layers:1;data:2' --layout=batch:data" in found.flags
    assert shlex.split(found.flags)[0] == "--mesh_shape=layers:1;data:2"
    # A training that was given its cuts has to be given others.
    assert found.flags.endswith("--boundaries=0,6")
    free = changes(plan, fast, BATCH, cuts_given=False)
    assert not [e for e in free if e.kind == "mesh" and "boundaries" in e.values]
    assert found.prediction.seconds < predict(plan, fast, BATCH).seconds
    other = min(e.prediction.seconds for e in changes(plan, slow, BATCH) if e.kind == "mesh")
    assert other > found.prediction.seconds + 40
    assert not [e for e in changes(plan, fast, BATCH, knows_links=False) if e.kind == "mesh"]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["layers:1", "layers:2", "layers:3"])
def test_every_change_is_a_plan_that_fits_and_its_values_make_it(mesh, remat):
    plan = Plan(mesh, num_microbatches=4, remat=remat)
    cuts = tuple(6 * n // plan.num_stages for n in range(plan.num_stages + 1))
    plan = Plan(mesh, num_microbatches=4, remat=remat, boundaries=cuts)
    limit = max(predict(plan, figures(), BATCH).memory)
    every = changes(plan, figures(), BATCH)
    fitting = changes(plan, figures(), BATCH, memory=limit)
    assert fitting == [e for e in every if max(e.prediction.memory) <= limit]
    assert [e.prediction.seconds for e in every] == sorted(e.prediction.seconds for e in every)
    for each in every:
        changed = Plan.from_values(plan.to_values() | dict(each.values))
        changed.check_batch(BATCH)
        again = predict(changed, figures(), BATCH)
        assert again.seconds == pytest.approx(each.prediction.seconds)
    first = best_of_each(every)
    assert len({e.kind for e in first}) == len(first) and first[:1] == every[:1]


def test_a_table_of_ones_own_is_kept_but_for_named_schedules():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    own = Plan(
        "layers:2", schedule=plan.table, num_microbatches=2, boundaries=(0, 3, 6), remat="none"
    )
    kinds = {each.kind for each in changes(own, figures(), BATCH)}
    assert "microbatches" not in kinds and "schedule" in kinds
