"""Changes of a plan fit and help, from figures, from flops, or from stages alone."""

import shlex

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, Prediction, predict
from pipemesh.plan.figures import figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.report import Record, read
from pipemesh.report.plan_changes import Basis, Change, basis_of, best
from tests.report import records

BATCH = 16


def figures(seconds=(1.0,) * 6, **more):
    costs = [
        LayerCost(s, backward=2 * s, parameter_bytes=8.0, activation_bytes=4.0, boundary_bytes=2.0)
        for s in seconds
    ]
    return Figures(tuple(figures_of_costs(costs, 1)), **{"action": 0.01} | more)


def changes(plan, found, batch=BATCH, **more):
    return Basis(plan, found, batch, **more).changes()


def named(plan, found, batch=BATCH, **more):
    """The best change that needs no other mesh."""
    every = [e for e in changes(plan, found, batch, **more) if e.kind != "mesh"]
    return best(every, predict(plan, found, batch).seconds)


def test_too_few_microbatches_are_named():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    found = named(plan, figures(), knows_layers=False)
    assert found.kind == "microbatches" and found.flags == "--num_microbatches=16"
    every = changes(plan, figures())
    tried = {e.values["num_microbatches"] for e in every if e.kind == "microbatches"}
    assert tried == {"1", "4", "8", "16"}
    now = predict(plan, figures(), BATCH).seconds
    assert found.prediction.seconds < 0.75 * now


def test_assumptions_are_named_and_limit_the_search():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    every = changes(plan, figures(), knows_rows=False, knows_halves=False)
    tried = {e.values["num_microbatches"] for e in every if e.kind == "microbatches"}
    assert tried == {"1", "4", "8"}
    for each in every:
        halves = each.values.get("schedule", "").startswith(("zb", "v_"))
        assert ("halves" in each.supposed) == halves
        assert ("rows" in each.supposed) == (each.kind == "microbatches")
        assert ("parts" in each.supposed) == (each.prediction.plan.num_stages > 2)


def test_bad_cut_is_named():
    plan = Plan("layers:2", num_microbatches=64, boundaries=(0, 5, 6), remat="none")
    # Of other schedules that cut anew some are shorter by a little, and say more.
    found = named(plan, figures(), 64)
    assert (found.kind, found.flags) == ("cuts", "--boundaries=0,3,6")
    # Of whole stages nothing can be cut anew.
    assert "cuts" not in {e.kind for e in changes(plan, figures(), knows_layers=False)}


def test_recomputation_is_named():
    plan = Plan("layers:2", num_microbatches=16, boundaries=(0, 3, 6), remat="full")
    found = named(plan, figures())
    assert (found.kind, found.flags) == ("remat", "--remat=none")
    now = predict(plan, figures(), BATCH).seconds
    assert found.prediction.seconds == pytest.approx(0.75 * now, rel=0.02)


def test_simplest_of_equal_changes_is_named():
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


def test_schedule_is_named_if_nothing_else_helps():
    plan = Plan("layers:4", num_microbatches=16, boundaries=(0, 2, 3, 4, 6), remat="none")
    found = named(plan, figures((0.5, 0.5, 1.0, 1.0, 0.5, 0.5)))
    assert found.kind == "schedule" and found.values["schedule"].startswith("z")
    assert found.prediction.seconds < predict(plan, figures(), BATCH).seconds


def test_layers_are_cut_again_for_other_stages():
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    every = changes(plan, figures())
    (looped,) = [e for e in every if e.values.get("schedule") == "interleaved:2"]
    assert looped.prediction.plan.num_stages == 4
    assert looped.flags.startswith("--schedule=interleaved:2 --boundaries=0,")
    assert Plan.from_values(plan.to_values() | dict(looped.values)) == looped.prediction.plan


def test_known_links_allow_fewer_stages_and_more_replicas():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    slow, fast = (figures(transfer=Link(0.0, rate)) for rate in (1.0, 1e9))
    meshes = {e.values["mesh"]: e for e in changes(plan, fast) if e.kind == "mesh"}
    assert set(meshes) == {"layers:1;data:2"}
    (found,) = meshes.values()
    assert "'--mesh_shape=layers:1;data:2' --layout=batch:data" in found.flags
    assert shlex.split(found.flags)[0] == "--mesh_shape=layers:1;data:2"
    # A training that was given its cuts has to be given others.
    assert found.flags.endswith("--boundaries=0,6")
    free = changes(plan, fast, cuts_given=False)
    assert not [e for e in free if e.kind == "mesh" and "boundaries" in e.values]
    assert found.prediction.seconds < predict(plan, fast, BATCH).seconds
    other = min(e.prediction.seconds for e in changes(plan, slow) if e.kind == "mesh")
    assert other > found.prediction.seconds + 40
    assert not [e for e in changes(plan, fast, knows_rows=False) if e.kind == "mesh"]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("mesh", ["layers:1", "layers:2", "layers:3"])
def test_every_change_fits_and_is_made_by_its_values(mesh, remat):
    plan = Plan(mesh, num_microbatches=4, remat=remat)
    cuts = tuple(6 * n // plan.num_stages for n in range(plan.num_stages + 1))
    plan = Plan(mesh, num_microbatches=4, remat=remat, boundaries=cuts)
    limit = max(predict(plan, figures(), BATCH).memory)
    every = changes(plan, figures())
    fitting = changes(plan, figures(), memory=limit)
    assert fitting == [e for e in every if max(e.prediction.memory) <= limit]
    assert [e.prediction.seconds for e in every] == sorted(e.prediction.seconds for e in every)
    for each in every:
        changed = Plan.from_values(plan.to_values() | dict(each.values))
        changed.check_batch(BATCH)
        again = predict(changed, figures(), BATCH)
        assert again.seconds == pytest.approx(each.prediction.seconds)


def test_custom_schedule_changes_only_to_named_ones():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 3, 6), remat="none")
    own = Plan(
        "layers:2", schedule=plan.table, num_microbatches=2, boundaries=(0, 3, 6), remat="none"
    )
    kinds = {each.kind for each in changes(own, figures())}
    assert "microbatches" not in kinds and "schedule" in kinds


def run_of(folder, told=(), **changes):
    """A training whose forecast has what is told, and whose step took 200 ms."""
    record = Record(str(folder))
    records.begin(record, plan=records.PLAN | changes)
    records.forecast(record, told)
    records.steps(record, 1, 3)
    records.schedule(record)
    return read(str(folder))


@pytest.mark.parametrize(
    ("told", "knows"),
    [
        (("rows",), [False, False, False, False]),
        (("rows", "layers"), [False, False, True, True]),
        (("rows", "layers", "predicted"), [True, True, True, True]),
    ],
    ids=["stages", "flops", "figures"],
)
def test_timed_step_is_reproduced(tmp_path, told, knows):
    found = run_of(tmp_path, told)
    basis = basis_of(found)
    assert isinstance(basis, Basis), basis
    assert [
        basis.knows_rows,
        basis.knows_halves,
        basis.knows_layers,
        basis.knows_memory,
    ] == knows
    now = predict(basis.plan, basis.figures, basis.batch)
    assert 1e3 * now.seconds == pytest.approx(records.TIMED, rel=1e-3)
    every = basis.changes()
    assert every[0].prediction.seconds < now.seconds
    assert any("boundaries" in each.values for each in every) == basis.knows_layers
    assert any(each.kind == "mesh" for each in every) == basis.knows_rows


def test_memory_limit_needs_memory_of_layers(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    limited = run_of(tmp_path / "a", ("rows", "layers", "limit"))
    basis = basis_of(limited)
    assert basis.memory == 24e6
    assert all(max(each.prediction.memory) <= 24e6 for each in basis.changes())
    # Of stages alone nothing is known, so nothing is left out.
    assert basis_of(run_of(tmp_path / "b", ("rows", "limit"))).changes()


def test_layers_without_bytes_have_unknown_memory(tmp_path):
    layers = [layer | {"activation_bytes": None} for layer in records.LAYERS]
    record = Record(str(tmp_path))
    records.begin(record)
    record.add("forecast", rows=16, cuts=[0, 2, 4], layers=layers)
    records.schedule(record)
    basis = basis_of(read(str(tmp_path)))
    assert basis.knows_layers and not basis.knows_memory


def test_schedule_that_ran_replaces_a_changed_one(tmp_path):
    found = run_of(tmp_path, ("rows", "layers"), schedule="gpipe")
    basis = basis_of(found)
    assert basis.plan.table.rows == found.measured().schedule.rows


@pytest.mark.parametrize(
    ("told", "changes", "why"),
    [
        ((), {}, "how large a batch is"),
        (("rows",), {"lowering": "simd", "schedule": "gpipe"}, "no actions"),
        (("rows",), {"mesh": "layers:x"}, "layers:x"),
        (("rows",), {"num_microbatches": "5"}, "make them equal"),
    ],
)
def test_basis_says_why_it_is_missing(tmp_path, told, changes, why):
    assert why in basis_of(run_of(tmp_path, told, **changes))


def test_recomputing_actions_have_no_forecast(tmp_path):
    from pipemesh.schedule import one_f_one_b, recompute, simulate

    table = recompute(one_f_one_b(2, 4))
    record = Record(str(tmp_path))
    records.begin(record)
    records.forecast(record, ("rows",))
    real = simulate(table)
    costs = real.costs.per_stage(2).durations()
    times = {"starts": real.starts, "ends": real.ends, "schedule": table.to_text()}
    record.add("schedule", costs=costs, **times)
    assert "recompute in actions of their own have no forecast" in basis_of(read(str(tmp_path)))
