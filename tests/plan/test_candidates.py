"""All plans that some devices can run a model under."""

import contextlib
import math
from fractions import Fraction

import numpy as np
import pytest

from pipemesh.errors import PipemeshError, PlanError, ScheduleError
from pipemesh.partition import LayerCost
from pipemesh.plan.candidates import Asked, Candidate, candidates, divisors, rated
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import figures_of_costs
from pipemesh.plan.predict import predict


def figures(layers=4, split=1, rules="", **more):
    costs = [
        LayerCost(1.0, backward=2.0, parameter_bytes=8.0, activation_bytes=4.0, boundary_bytes=2.0)
    ] * layers
    summed = [6.0] * layers if split > 1 else []
    layers_ = figures_of_costs(costs, 1, split=split, summed=summed)
    return Figures(tuple(layers_), rules=rules, **more)


def test_all_combinations_are_there():
    found = set(candidates(figures(8, split=4, rules="heads:model"), Asked(8, 16)))
    meshes = {(each.places, each.replicas, each.group) for each in found}
    # Up to 8 devices, of which no more than 4 share a layer.
    wanted = {
        (p, d, m) for p in range(1, 9) for d in (1, 2, 4, 8) for m in (1, 2, 4) if p * d * m <= 8
    }
    assert meshes == wanted
    assert {each.schedule for each in found if each.places == 1} == {"1f1b"}
    assert {"zb_v", "interleaved:2"} <= {each.schedule for each in found if each.places == 4}
    # Two stages a device are more than there are layers.
    assert "zb_v" not in {each.schedule for each in found if each.places == 8}
    numbers = {each.num_microbatches for each in found if each.replicas == 4}
    assert numbers == {1, 2, 4}
    assert {each.remat for each in found} == {"none", "full"}


def test_nothing_is_split_that_cannot_be():
    assert {each.group for each in candidates(figures(), Asked(8, 16))} == {1}
    # Slices are equal: 6 heads are not for four devices, nor 4 in one layer and 6 in another.
    six = figures(split=6, rules="heads:model")
    assert {each.group for each in candidates(six, Asked(8, 16))} == {1, 2, 3, 6}
    both = (*six.layers, *figures(split=4).layers)
    mixed = Figures(both, rules="heads:model")
    assert {each.group for each in candidates(mixed, Asked(12, 24))} == {1, 2}
    # A batch of odd rows has no replicas.
    assert {each.replicas for each in candidates(figures(), Asked(4, 15))} == {1, 3}


@pytest.mark.parametrize(
    ("fixed", "of"),
    [
        ({"schedule": "gpipe"}, lambda each: each.schedule == "gpipe"),
        ({"num_microbatches": "4"}, lambda each: each.num_microbatches == 4),
        ({"remat": "full"}, lambda each: each.remat == "full"),
        (
            {"mesh": "layers:2;rows:2", "layout": "batch:rows"},
            lambda each: (each.places, each.replicas, each.group) == (2, 2, 1),
        ),
    ],
)
def test_what_is_asked_for_stays(fixed, of):
    asked = Asked(4, 16, fixed=fixed)
    found = list(candidates(figures(), asked))
    assert found and all(map(of, found))
    for each in found:
        with contextlib.suppress(ScheduleError):
            values = each.plan(figures(), asked).to_values()
            assert {name: str(values[name]) for name in fixed} == fixed


def test_what_is_malformed_is_an_error():
    with pytest.raises(PipemeshError, match="names axis 'x'"):
        list(candidates(figures(), Asked(4, 16, fixed={"mesh": "layers:2", "layout": "batch:x"})))
    with pytest.raises(PipemeshError):
        list(candidates(figures(), Asked(4, 16, fixed={"schedule": "1f1c"})))
    for wrong in ((0, 16), (2.5, 16), (4, -1), (4, 16, "80 boxes"), (4, 16, 0), (4, 16, math.nan)):
        with pytest.raises(PlanError):
            Asked(*wrong)


def test_numbers_may_be_of_numpy_and_bytes_may_be_text():
    numbers = (
        (np.int64(2), np.int32(4), np.float32(8e9)),
        (2, 4, Fraction(8 * 10**9)),
        (2, 4, "8GB"),
    )
    assert all(Asked(*each) == Asked(2, 4, 8e9) for each in numbers)


def test_a_mesh_has_no_more_devices_than_there_are():
    with pytest.raises(PlanError, match="'layers:4' has 4 devices, but there are 2"):
        list(candidates(figures(), Asked(2, 4, fixed={"mesh": "layers:4"})))


def test_a_candidate_becomes_a_plan():
    asked = Asked(4, 16)
    found = figures(5, split=2, rules="heads:model")
    plan = Candidate(2, 1, 2, "zb_h1", 4, "none").plan(found, asked)
    assert str(plan.mesh) == "layers:2;model:2" and str(plan.layout) == "heads:model"
    assert (plan.schedule, plan.num_microbatches, plan.remat) == ("zb_h1", 4, "none")
    assert plan.boundaries is None
    with pytest.raises(ScheduleError, match="multiple"):
        Candidate(2, 1, 1, "interleaved:2", 3, "none").plan(found, asked)


def test_the_formula_puts_good_plans_first():
    """The best of all is among the first tenth, whether devices share cores or not."""
    for cores in (None, 2.0):
        found = figures(8, action=0.01, cores=cores)
        asked = Asked(4, 16, schedules=("1f1b", "gpipe", "zb_h1"))
        seconds = []
        for each in rated(found, asked):
            with contextlib.suppress(PipemeshError):
                plan = each.plan(found, asked)
                seconds.append(predict(plan, found, 16, parts=False).seconds)
        assert min(seconds[: len(seconds) // 10]) <= 1.001 * min(seconds)


def test_divisors_are_all():
    assert divisors(36) == [n for n in range(1, 37) if 36 % n == 0]
