"""The best plan for some devices, and the nearest one that fits."""

import contextlib
import re
import time

import pytest

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan
from pipemesh.plan.candidates import Asked, rated
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.plan.predict import predict
from pipemesh.plan.search import nearest_that_fits, search


def figures(layers=4, seconds=None, **more):
    costs = [
        LayerCost(s, backward=2 * s, parameter_bytes=8.0, activation_bytes=4.0, boundary_bytes=2.0)
        for s in (seconds or [1.0] * layers)
    ]
    more = {"action": 0.05, "transfer": Link(0.01, 100.0)} | more
    return Figures(tuple(figures_of_costs(costs, 1)), **more)


def all_of(found, asked):
    forecasts = []
    for each in rated(found, asked):
        with contextlib.suppress(PipemeshError):
            plan = each.plan(found, asked)
            forecasts.append(predict(plan, found, asked.batch, parts=False))
    return forecasts


def test_nothing_is_better_than_what_is_found():
    found = figures(6, [3.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    for memory in (None, 120.0):
        asked = Asked(4, 8, memory)
        best = search(found, asked)
        every = all_of(found, asked)
        fitting = [each.seconds for each in every if memory is None or max(each.memory) <= memory]
        assert best[0].seconds <= min(fitting)
        assert [each.seconds for each in best] == sorted(each.seconds for each in best)
        assert all(memory is None or max(each.memory) <= memory for each in best)
        assert len({each.plan for each in best}) == len(best) == 10


def test_what_is_found_says_what_it_is_made_of():
    [best] = search(figures(), Asked(4, 8), count=1)
    assert sum(best.parts.values()) == pytest.approx(best.seconds)
    assert best == predict(best.plan, figures(), 8)


def test_cuts_are_moved_where_that_helps():
    """Equal stages are not best where a stage waits for its transfers."""
    found = figures(8, [1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0])
    asked = Asked(4, 8, fixed={"mesh": "layers:4"})
    before = min(all_of(found, asked), key=lambda each: each.seconds)
    assert search(found, asked, count=1)[0].seconds <= before.seconds


def test_cuts_that_are_asked_for_stay():
    asked = Asked(2, 8, fixed={"mesh": "layers:2", "schedule": "1f1b", "boundaries": "0,1,4"})
    assert {each.plan.boundaries for each in search(figures(), asked)} == {(0, 1, 4)}


def test_the_time_is_kept():
    found = figures(48)
    begin = time.monotonic()
    best = search(found, Asked(16, 128), seconds=1.0)
    assert time.monotonic() - begin < 6
    assert len(best) == 10


def test_nothing_that_fits_is_an_error_that_names_the_leanest():
    with pytest.raises(PlanError, match=r"no plan fits into 10 bytes a device.* is 'mesh=layers:4"):
        search(figures(), Asked(4, 8, memory=10.0))


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ({"remat": "fulll"}, "'fulll' is no policy; did you mean 'full'?"),
        ({"num_microbatches": "x"}, "'x' is no whole number"),
        ({"num_microbatches": "0"}, "num_microbatches is 0; it must be a whole number from 1 on"),
        ({"num_microbatches": "3"}, "does not divide into 3 microbatches"),
        ({"mesh": "layers:2", "boundaries": "0,2,9"}, "boundaries end at 9, but there are 4"),
        ({"lowering": "simd"}, "lowering=simd has no actions"),
        ({"compute_dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"schedule": "file:/nope.csv"}, "/nope.csv"),
        ({"mesh": "layers:7"}, "have 7 stages, but there are 4 layers; use at most 4 stages"),
    ],
)
def test_a_fixed_value_is_refused_with_its_own_reason(fixed, told):
    with pytest.raises(PlanError, match=re.escape(told)):
        search(figures(), Asked(7, 8, fixed=fixed))


def test_a_search_in_which_nothing_fits_ends():
    """It went on until all combinations were tried, however little time there was."""
    with pytest.raises(PlanError, match="no plan fits into 10 bytes a device, of those that were"):
        begin = time.monotonic()
        search(figures(24), Asked(24, 64, memory=10), seconds=0.5)
    assert time.monotonic() - begin < 30


def test_one_table_is_one_plan_by_whatever_name():
    """With one microbatch GPipe and 1F1B are the same."""
    fixed = {"num_microbatches": "1", "mesh": "layers:2", "remat": "none"}
    found = search(figures(), Asked(2, 8, fixed=fixed, schedules=("gpipe", "1f1b")))
    assert len(found) == 1


def test_the_nearest_plan_differs_in_least():
    found = figures(4)
    plan = Plan("layers:2", schedule="gpipe", num_microbatches=8, remat="none")
    held = max(predict(plan, found, 8).memory)
    asked = Asked(2, 8, memory=held * 0.9)
    nearest = nearest_that_fits(plan, found, asked)
    assert max(nearest.memory) <= asked.memory
    mine, theirs = plan.to_values(), nearest.plan.to_values()
    differ = [n for n in mine if mine[n] != theirs[n] and n not in ("boundaries", "layout")]
    assert len(differ) == 1
    # Of those the fastest: 1F1B holds less and takes no longer, remat would.
    assert differ == ["schedule"]


def test_no_nearest_plan_is_an_error():
    plan = Plan("layers:2", num_microbatches=8)
    with pytest.raises(PlanError, match="no plan fits"):
        nearest_that_fits(plan, figures(), Asked(2, 8, memory=1.0))
