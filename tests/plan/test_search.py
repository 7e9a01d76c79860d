"""Candidates, cuts, the best plan, the nearest that fits, and one for fewer devices."""

import contextlib
import dataclasses
import math
import re
import time
from fractions import Fraction

import numpy as np
import pytest

from pipemesh.errors import PipemeshError, PlanError, ScheduleError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan, Remat
from pipemesh.plan.figures import Figures, Shares, all_reduces, figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.plan.predict import predict
from pipemesh.plan.search import (
    SearchSpace,
    Split,
    candidates,
    cut_to_fit,
    fewer,
    fits,
    nearest_that_fits,
    rated,
    search,
    with_better_cuts,
)
from tests.plan.stacks import figures, line, with_ends


def test_all_combinations_are_there():
    found = set(candidates(figures(8, split=4, rules="heads:model"), SearchSpace(8, 16)))
    meshes = {(each.layers, each.data, each.model) for each in found}
    # Up to 8 devices, of which no more than 4 share a layer.
    wanted = {
        (p, d, m) for p in range(1, 9) for d in (1, 2, 4, 8) for m in (1, 2, 4) if p * d * m <= 8
    }
    assert meshes == wanted
    assert {each.schedule for each in found if each.layers == 1} == {"1f1b"}
    assert {"zb_v", "interleaved:2"} <= {each.schedule for each in found if each.layers == 4}
    # Two stages a device are more than there are layers.
    assert "zb_v" not in {each.schedule for each in found if each.layers == 8}
    numbers = {each.num_microbatches for each in found if each.data == 4}
    assert numbers == {1, 2, 4}
    assert {str(each.remat) for each in found} == {"none", "full"}


def test_sequences_are_cut_where_all_layers_can_be_given_slices():
    def schedules(positions):
        found = candidates(figures(positions=positions), SearchSpace(2, 4))
        return {each.schedule for each in found if each.schedule.startswith("seq")}

    assert schedules(0) == set()
    assert schedules(6) == {"seq1f1b:2"}
    assert schedules(8) == {"seq1f1b:2", "seq1f1b:4"}
    # One row is no pipeline otherwise: four seconds of each device, and its bubble of a fourth.
    best = search(figures(positions=8), SearchSpace(2, 1))[0]
    assert best.plan.schedule == "seq1f1b:4"
    assert best.seconds == pytest.approx(3 * 2 * (4 + 1) / 4)
    assert "seq" not in search(figures(), SearchSpace(2, 1))[0].plan.schedule


def test_slices_of_equal_work_are_tried_where_work_grows():
    known = figures(positions=6)
    layers = [dataclasses.replace(layer, row_work=(1.0, 3.0)) for layer in known.layers]
    known = dataclasses.replace(known, layers=tuple(layers))
    found = {each.schedule for each in candidates(known, SearchSpace(2, 4))}
    wanted = {"seq1f1b:2", "seq1f1b:2:equal_work", "seq1f1b:4:equal_work"}
    assert {name for name in found if name.startswith("seq")} == wanted
    assert search(known, SearchSpace(2, 1))[0].plan.schedule == "seq1f1b:4:equal_work"


def test_nothing_is_split_that_cannot_be():
    assert {each.model for each in candidates(figures(), SearchSpace(8, 16))} == {1}
    # Slices are equal: 6 heads are not for four devices, nor 4 in one layer and 6 in another.
    six = figures(split=6, rules="heads:model")
    assert {each.model for each in candidates(six, SearchSpace(8, 16))} == {1, 2, 3, 6}
    both = (*six.layers, *figures(split=4).layers)
    mixed = Figures(both, rules="heads:model")
    assert {each.model for each in candidates(mixed, SearchSpace(12, 24))} == {1, 2}
    # A batch of odd rows has no replicas.
    assert {each.data for each in candidates(figures(), SearchSpace(4, 15))} == {1, 3}


@pytest.mark.parametrize(
    ("fixed", "of"),
    [
        ({"schedule": "gpipe"}, lambda each: each.schedule == "gpipe"),
        ({"num_microbatches": "4"}, lambda each: each.num_microbatches == 4),
        ({"remat": "full"}, lambda each: each.remat.is_full),
        (
            {"mesh": "layers:2;rows:2", "layout": "batch:rows"},
            lambda each: (each.layers, each.data, each.model) == (2, 2, 1),
        ),
    ],
)
def test_fixed_values_stay(fixed, of):
    space = SearchSpace(4, 16, fixed=fixed)
    found = list(candidates(figures(), space))
    assert found and all(map(of, found))
    for each in found:
        with contextlib.suppress(ScheduleError):
            values = each.plan(figures(), space).to_values()
            assert {name: str(values[name]) for name in fixed} == fixed


@pytest.mark.parametrize(
    "wrong", [(0, 16), (2.5, 16), (4, -1), (4, 16, "80 boxes"), (4, 16, 0), (4, 16, math.nan)]
)
def test_malformed_spaces_are_errors(wrong):
    with pytest.raises(PlanError):
        SearchSpace(*wrong)


def test_numbers_may_be_of_numpy_and_bytes_may_be_text():
    numbers = (
        (np.int64(2), np.int32(4), np.float32(8e9)),
        (2, 4, Fraction(8 * 10**9)),
        (2, 4, "8GB"),
    )
    assert all(SearchSpace(*each) == SearchSpace(2, 4, 8e9) for each in numbers)


def test_a_candidate_becomes_a_plan():
    space = SearchSpace(4, 16)
    found = figures(5, split=2, rules="heads:model")
    plan = Split(2, 1, 2, "zb_h1", 4, Remat.NONE).plan(found, space)
    assert str(plan.mesh) == "layers:2;model:2" and str(plan.layout) == "heads:model"
    assert (plan.schedule, plan.num_microbatches, plan.remat) == ("zb_h1", 4, Remat.NONE)
    assert plan.boundaries is None
    with pytest.raises(ScheduleError, match="multiple"):
        Split(2, 1, 1, "interleaved:2", 3, Remat.NONE).plan(found, space)


def test_one_program_is_searched_with_rules_for_the_axis_of_stages():
    stages = {"mesh": "layers:2", "remat": "full"}
    # One layer takes longer than all others together, so no cut is even.
    best = search(with_ends(), SearchSpace(2, 8, fixed=stages))[0]
    assert str(best.plan.layout) == "vocab:layers" and best.plan.boundaries == (0, 2, 3, 4, 6)
    assert (best.plan.lowering, best.plan.schedule) == ("simd", "looped_bfs:2")
    assert best.plan.num_microbatches == 8 and best.seconds == 17 * 4 + 96
    # A user's values stay: another lowering, its schedule, its rules.
    for fixed in ({"lowering": "placement"}, {"layout": "batch:data"}, {"schedule": "gpipe"}):
        found = candidates(with_ends(), SearchSpace(4, 8, fixed=fixed))
        programs = [each for each in found if each.lowering == "simd"]
        assert bool(programs) == ("lowering" not in fixed)
        assert not any(each.ends for each in programs) or "layout" not in fixed
        assert {each.schedule for each in programs} <= {"gpipe"} or "schedule" not in fixed
    only = SearchSpace(2, 8, fixed={"lowering": "simd"})
    assert {each.lowering for each in candidates(with_ends(), only)} == {"simd"}
    # It has no other cuts, so none are tried.
    assert fits(search(with_ends(), dataclasses.replace(only, memory=250.0))[0], only)
    with pytest.raises(PlanError, match=r"no plan fits into 40 bytes .* needs least, .*simd"):
        search(with_ends(), dataclasses.replace(only, memory=40.0), seconds=1.0)


# Three ways to share a layer: its own rules, faster ones for its length, and two replicas that cut
# its weights.
SHARES = {
    "": all_reduces(2, line(6.0)),
    "length:model": Shares(2, work=1.0, weights=0.0, outputs=1.0),
    "embed:data": Shares(cut=1.0, replicas=2),
}


def shared(layers, **more):
    found = figures(layers, rules="heads:model", **more)
    return dataclasses.replace(
        found, layers=tuple(dataclasses.replace(each, shares=SHARES) for each in found.layers)
    )


def test_layout_rules_are_searched():
    """Rules for which devices send nothing to each other are faster than those that figures name
    first, and a rule that is given stays.
    """
    found = shared(2, transfer=Link(0.01, 1e3))
    best = search(found, SearchSpace(2, 1))[0].plan
    assert (str(best.mesh), str(best.layout)) == ("layers:1;model:2", "length:model")
    fixed = SearchSpace(2, 1, fixed={"mesh": "layers:1;axis:2", "layout": "heads:axis"})
    chosen = search(found, fixed)[0]
    assert str(chosen.plan.layout) == "heads:axis"
    # Also without a mesh, over the axes of the search.
    for layout, mesh in (("heads:model", "layers:1;model:2"), ("batch:data", "layers:1;data:2")):
        for each in search(found, SearchSpace(2, 2, fixed={"layout": layout})):
            assert (str(each.plan.mesh), str(each.plan.layout)) == (mesh, layout)
    plans = [
        Plan("layers:1;model:2", f"{dim}:model", remat="none")
        for dim in ("heads", "length", "other")
    ]
    own, length, other = (predict(plan, found, 1) for plan in plans)
    assert chosen.seconds == own.seconds > length.seconds
    # A layout that figures do not know counts as their own rules, and the forecast says so.
    assert other.seconds == own.seconds and not own.supposed
    assert "do not know how 'other:model' splits" in other.supposed


def test_weights_are_cut_where_nothing_else_fits():
    """Each of two replicas then holds half of the weights between two actions; the peak is that of
    the update, which is after the last one.
    """
    found = shared(1, update_memory=5.0, optimizer=2.0)
    free = search(found, SearchSpace(2, 2, fixed={"num_microbatches": "1"}))
    assert not any("embed" in str(each.plan.layout) for each in free)
    # Weights, state and update of one layer of 8 bytes.
    plans = [
        Plan("layers:1;data:2", f"batch:data{rule}", remat="none") for rule in ("", ";embed:data")
    ]
    copies, cut = (max(predict(plan, found, 2).memory) for plan in plans)
    assert (copies, cut) == (8 + 8 + 24, 4 + 8 + 24)
    space = SearchSpace(2, 2, memory=cut)
    only = dataclasses.replace(
        found,
        layers=tuple(
            dataclasses.replace(each, shares={"embed:data": SHARES["embed:data"]})
            for each in found.layers
        ),
    )
    best = search(only, space)[0]
    assert str(best.plan.layout) == "batch:data;embed:data" and max(best.memory) == cut
    with pytest.raises(PlanError, match="no plan fits"):
        fixed = {"mesh": "layers:1;data:2", "layout": "batch:data"}
        search(only, dataclasses.replace(space, fixed=fixed))
    nearest = nearest_that_fits(Plan("layers:1;data:2", "batch:data"), only, space)
    assert str(nearest.plan.layout) == "batch:data;embed:data"


def test_the_formula_puts_good_plans_first():
    """The best of all is among the first tenth, whether devices share cores or not."""
    for cores in (None, 2.0):
        found = figures(8, action=0.01, cores=cores)
        space = SearchSpace(4, 16, schedules=("1f1b", "gpipe", "zb_h1", "seq1f1b:2"))
        seconds = []
        for each in rated(found, space):
            with contextlib.suppress(PipemeshError):
                plan = each.plan(found, space)
                seconds.append(predict(plan, found, 16, parts=False).seconds)
        assert min(seconds[: len(seconds) // 10]) <= 1.001 * min(seconds)


def test_layers_are_cut_by_memory_where_seconds_need_too_much():
    seconds, kept = (1e-3, 1e-3, 2e-3), (4e6, 4e6, 1e6)
    costs = [LayerCost(forward=s, activation_bytes=k) for s, k in zip(seconds, kept, strict=True)]
    figures = Figures(tuple(figures_of_costs(costs, 1)))
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 2, 3), remat="none")
    tight, space = predict(plan, figures, 4), SearchSpace(2, 4, 10e6)
    assert not fits(tight, space)
    for found in (
        cut_to_fit(tight, figures, space),
        with_better_cuts(tight, figures, space, math.inf),
    ):
        assert fits(found, space) and found.plan.boundaries == (0, 1, 3)


def test_cuts_count_the_copy_of_weights_in_the_compute_dtype():
    """Cuts left it out, so no limit was tight enough for the partitioner to move a layer."""
    weights, kept = (10, 0, 40), (4, 40, 1)
    costs = [
        LayerCost(s, parameter_bytes=w, activation_bytes=k)
        for s, w, k in zip((3, 1, 2), weights, kept, strict=True)
    ]
    layers = Figures(tuple(figures_of_costs(costs, 1)))
    plan = Plan(
        "layers:2", num_microbatches=4, boundaries=(0, 1, 3), remat="none", compute_dtype="bfloat16"
    )
    space = SearchSpace(2, 4, memory=186.0)
    found = cut_to_fit(predict(plan, layers, 4), layers, space)
    assert fits(found, space) and found.plan.boundaries == (0, 2, 3)


def slow(seconds=4):
    """A stack whose actions and transfers take some time too."""
    return figures(seconds, action=0.05, transfer=Link(0.01, 100.0))


def test_found_plans_fit_and_differ_shortest_first():
    found = search(slow([3.0, 1.0, 1.0, 1.0, 1.0, 2.0]), SearchSpace(4, 8, 120.0))
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert all(max(each.memory) <= 120.0 for each in found)
    assert len({each.plan for each in found}) == len(found) == 10
    [best] = search(slow(), SearchSpace(4, 8), count=1)
    assert sum(best.parts.values()) == pytest.approx(best.seconds)
    assert best == predict(best.plan, slow(), 8)


def test_cuts_that_are_asked_for_stay():
    space = SearchSpace(2, 8, fixed={"mesh": "layers:2", "schedule": "1f1b", "boundaries": "0,1,4"})
    assert {each.plan.boundaries for each in search(slow(), space)} == {(0, 1, 4)}


def test_the_time_is_kept():
    found = slow(48)
    begin = time.monotonic()
    best = search(found, SearchSpace(16, 128), seconds=1.0)
    assert time.monotonic() - begin < 6
    assert len(best) == 10


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ({"remat": "fulll"}, "'fulll' is no policy; did you mean 'full'?"),
        ({"num_microbatches": "x"}, "'x' is no whole number"),
        ({"num_microbatches": "0"}, "num_microbatches is 0; it must be a whole number from 1 on"),
        ({"num_microbatches": "3"}, "does not divide into 3 microbatches"),
        ({"mesh": "layers:2", "boundaries": "0,2,9"}, "boundaries end at 9, but there are 4"),
        ({"lowering": "simd"}, "are alike and have named dims, of which there are 0"),
        ({"lowering": "simd", "schedule": "1f1b"}, "of which there are 0"),
        ({"compute_dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"schedule": "file:/nope.csv"}, "/nope.csv"),
        ({"mesh": "layers:7"}, "have 7 stages, but there are 4 layers; use at most 4 stages"),
        ({"mesh": "layers:8"}, "'layers:8' has 8 devices, but there are 7"),
        ({"mesh": "layers:2", "layout": "batch:x"}, "names axis 'x'"),
        ({"schedule": "1f1c"}, "did you mean '1f1b'"),
    ],
)
def test_a_fixed_value_is_refused_with_its_own_reason(fixed, told):
    with pytest.raises(PipemeshError, match=re.escape(told)):
        search(slow(), SearchSpace(7, 8, fixed=fixed))


def test_a_search_in_which_nothing_fits_ends():
    """It went on until all combinations were tried, however little time there was."""
    begin = time.monotonic()
    leanest = r"no plan fits into 10 bytes a device, of those that were tried.* is 'mesh=layers:"
    with pytest.raises(PlanError, match=leanest):
        search(slow(24), SearchSpace(24, 64, memory=10), seconds=0.5)
    assert time.monotonic() - begin < 30


def test_equal_tables_are_one_plan():
    """With one microbatch GPipe and 1F1B are the same."""
    fixed = {"num_microbatches": "1", "mesh": "layers:2", "remat": "none"}
    found = search(slow(), SearchSpace(2, 8, fixed=fixed, schedules=("gpipe", "1f1b")))
    assert len(found) == 1


def test_the_nearest_plan_differs_in_least():
    found = slow(4)
    plan = Plan("layers:2", schedule="gpipe", num_microbatches=8, remat="none")
    held = max(predict(plan, found, 8).memory)
    space = SearchSpace(2, 8, memory=held * 0.9)
    nearest = nearest_that_fits(plan, found, space)
    assert max(nearest.memory) <= space.memory
    mine, theirs = plan.to_values(), nearest.plan.to_values()
    differ = [n for n in mine if mine[n] != theirs[n] and n not in ("boundaries", "layout")]
    assert len(differ) == 1
    # Of those the fastest: 1F1B holds less and takes no longer, remat would.
    assert differ == ["schedule"]
    with pytest.raises(PlanError, match="no plan fits"):
        nearest_that_fits(plan, found, SearchSpace(2, 8, memory=1.0))


SPLIT = "layout=batch:data;d_ff:model"


@pytest.mark.parametrize(
    ("plan", "devices", "wanted"),
    [
        ("mesh=layers:4 num_microbatches=8", 3, "layers:3"),
        ("mesh=layers:4 num_microbatches=8", 1, "layers:1"),
        # Replicas hold most of all, so they go first; what is split stays so.
        ("mesh=layers:2;data:2 layout=batch:data", 2, "layers:2;data:1"),
        ("mesh=layers:2;data:4 layout=batch:data", 7, "layers:2;data:2"),
        (f"mesh=layers:2;data:2;model:2 {SPLIT}", 4, "layers:2;data:1;model:2"),
        # A dim that divides by 6 divides by 3, 2 and 1.
        ("mesh=layers:1;model:6 layout=d_ff:model", 5, "layers:1;model:3"),
        ("mesh=layers:2;data:2 layout=batch:data", 4, "layers:2;data:2"),
        ("mesh=layers:2;data:2 layout=batch:data", 9, "layers:2;data:2"),
        # On 3 devices interleaved stages need a multiple of 3 microbatches.
        ("mesh=layers:4 schedule=interleaved:2 num_microbatches=8", 3, "layers:2"),
    ],
)
def test_fewer_devices_keep_the_largest_mesh(plan, devices, wanted):
    before = Plan.from_text(plan)
    found = fewer(before, devices)
    assert str(found.mesh) == wanted
    assert set(before.changes(found)) <= {"mesh"}


def test_boundaries_go_with_the_number_of_stages():
    plan = Plan("layers:3", num_microbatches=4, boundaries=(0, 1, 2, 5))
    assert fewer(plan, 2).boundaries is None
    plan = Plan("layers:2;data:2", "batch:data", num_microbatches=4, boundaries=(0, 3, 5))
    assert fewer(plan, 3).boundaries == (0, 3, 5)


def test_a_table_is_for_its_number_of_places():
    plan = Plan("layers:2;data:2", "batch:data", num_microbatches=2)
    plan = Plan(plan.mesh, plan.layout, plan.table, num_microbatches=2)
    assert str(fewer(plan, 2).mesh) == "layers:2;data:1"
    with pytest.raises(PlanError, match="is for 2 places"):
        fewer(plan, 1)


def test_plans_that_the_model_rejects_are_skipped_and_the_reason_is_named():
    def check(plan):
        plan.check_batch(8)
        if plan.num_stages in (1, 3):
            raise PlanError("it has no such layer")

    assert str(fewer(Plan("layers:4", num_microbatches=4), 3, check).mesh) == "layers:2"
    with pytest.raises(PlanError, match=r"1 are left, and no smaller mesh .* no such layer"):
        fewer(Plan("layers:2"), 1, check)
    with pytest.raises(PlanError, match="not made smaller"):
        fewer(Plan("layers:2;model:2,1", "d_ff:model"), 2)
