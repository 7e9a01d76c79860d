"""Forecast, scale and search of random stacks, held against each other and against all plans.

python -m pytest tests/plan/test_random_plans.py --cases=all
"""

import contextlib
import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import PipemeshError
from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, Remat, SearchSpace, predict, search
from pipemesh.plan.figures import Collective, Curve, Shares, figures_of_costs
from pipemesh.plan.many_devices import Job, Split, forecast_step
from pipemesh.plan.network import Link, Network
from pipemesh.plan.search import candidates

FEW = 4
SEEDS = [
    *range(FEW),
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(FEW, 60)),
]
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved:2", "zb_v")
POLICIES = ("none", "full", "except_last", "twice")


def other_shares(draw):
    """How devices share a layer by other rules, some of which cut its weights over replicas."""
    sent = (
        Collective("all_gather", False, 2, Curve(((1, draw.choice((1e4, 1e6))),))),
        Collective("reduce_scatter", True, 1, Curve(((1, 1e5),))),
    )
    split = Shares(
        2,
        sent,
        work=draw.uniform(0.5, 1),
        weights=draw.choice((0.0, 1.0)),
        outputs=draw.choice((0.0, 1.0)),
        whole=Curve(((1, 1e6),)),
    )
    cut = {"cut": draw.choice((0.0, 0.9)), "replicas": 2}
    return {"e:model": split, "e:data": Shares(**cut), "d:data;e:model": Shares(2, sent, **cut)}


def stack(draw, layers=None, **more):
    """Layers whose times rise unevenly with the rows, some measured as falling."""
    costs = [
        LayerCost(
            forward=draw.choice((1e-3, 1e-3, 2e-3, 5e-3)),
            parameter_bytes=draw.choice((0, 1e6, 4e6, 1e7)),
            activation_bytes=draw.choice((1e6, 4e6, 8e6)),
            boundary_bytes=draw.choice((1e5, 2e5)),
        )
        for _ in range(layers or draw.randint(2, 4))
    ]
    found = []
    for layer in figures_of_costs(costs, 1, split=2, summed=[1e5] * len(costs)):
        times = {}
        for kind, curve in layer.seconds.items():
            points = ((rows, curve.at(rows) * draw.uniform(0.8, 1.2)) for rows in (1, 2, 4, 8))
            times[kind] = Curve((*points, (16, curve.at(16) * draw.uniform(0.2, 1.0))))
        shares = layer.shares | other_shares(draw)
        found.append(dataclasses.replace(layer, seconds=times, shares=shares))
    link = Link(1e-5, draw.choice((1e8, 1e10)))
    action = draw.choice((0.0, 1e-4))
    return Figures(tuple(found), action=action, transfer=link, rules="d:model", **more)


def random_plan(draw, layers, batch):
    """A plan that can be had, of all that there are."""
    while True:
        with contextlib.suppress(PipemeshError):
            places, data, model = draw.choice((1, 2, 3, 4)), *draw.choices((1, 2), k=2)
            schedule = draw.choice(SCHEDULES) if places > 1 else "1f1b"
            plan = Plan(
                f"layers:{places};data:{data};model:{model}",
                "batch:data;d:model",
                schedule,
                draw.choice((1, 2, 4, 8)),
            )
            plan.check_batch(batch)
            plan.check_layers(layers)
            policies = [draw.choice(POLICIES) for _ in range(plan.num_stages)]
            return dataclasses.replace(plan, remat=draw.choice((*POLICIES, ",".join(policies))))


@pytest.mark.parametrize("seed", SEEDS)
def test_laws_of_forecasts(seed):
    """Parts add up; more rows, and more that is computed again, take no less."""
    draw = random.Random(seed)
    for _ in range(10):
        found = stack(draw, layers=8, cores=draw.choice((None, 2.0)))
        plan = random_plan(draw, 8, 16)
        told = predict(plan, found, 16)
        assert min(told.parts.values()) >= 0 and 0 <= told.bubble <= 1
        assert sum(told.parts.values()) == pytest.approx(told.seconds)
        if found.cores is not None:
            continue
        for batch in (32, 64, 512):
            more = predict(plan, found, batch, parts=False)
            assert more.seconds >= told.seconds * (1 - 1e-9)
        every = [dataclasses.replace(plan, remat=remat) for remat in ("none", plan.remat, "twice")]
        seconds = [predict(each, found, 16, parts=False).seconds for each in every]
        assert seconds == sorted(seconds)


@st.composite
def splits(draw):
    """Splits with every spelling of remat: for all stages, and for each stage."""
    places, schedule = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from(SCHEDULES))
    number = draw(st.sampled_from((1, 4, 16, 128)))
    if places == 1 or number % places:
        schedule = "1f1b"
    stages = Plan(f"layers:{places}", schedule=schedule, num_microbatches=number).num_stages
    policy = st.sampled_from((*POLICIES, "custom"))
    policies = draw(st.lists(policy, min_size=stages, max_size=stages) | policy.map(lambda p: [p]))
    group = draw(st.sampled_from((1, 2)))
    layout = draw(st.sampled_from(("", "e:model", "d:data;e:model") if group > 1 else ("e:data",)))
    return Split(places, 2, group, schedule, number, Remat(tuple(policies)), layout)


@settings(max_examples=30, deadline=None)
@given(splits(), st.randoms(use_true_random=False))
def test_forecast_step_agrees_with_predict(split, draw):
    """Of any split and policy; of many microbatches it simulates fewer, and goes on from there."""
    found = stack(draw, layers=8)
    network = Network(4, Link(1e-5, 1e9), Link(1e-4, 1e8))
    plan = Plan(
        f"layers:{split.layers};data:2;model:{split.model}",
        split.rules(found),
        split.schedule,
        split.num_microbatches,
        remat=split.remat,
    )
    told = predict(plan, found, 256, network=network)
    step = forecast_step(Job(found.layers, network, 256, action=found.action), split)
    assert step.seconds == pytest.approx(told.seconds, rel=2e-3)
    assert step.memory == pytest.approx(told.memory, rel=1e-9)
    assert step.bubble == pytest.approx(told.bubble, abs=2e-3)
    if split.num_microbatches <= 16:
        assert step.parts == pytest.approx(told.parts)
    # One policy for all stages is that policy for each, and custom counts as full.
    policies = split.remat.policies
    if len(policies) == 1:
        policies *= plan.num_stages
    spelled = tuple("full" if policy == "custom" else policy for policy in policies)
    other = predict(dataclasses.replace(plan, remat=Remat(spelled)), found, 256, network=network)
    assert (other.parts, other.memory) == (told.parts, told.memory)


def every(found, space):
    """Forecasts of all plans, with all cuts."""
    count = len(found.layers)
    for candidate in candidates(found, space):
        with contextlib.suppress(PipemeshError):
            plan = candidate.plan(found, space)
            plan.check_layers(count)
            for cuts in itertools.combinations(range(1, count), plan.num_stages - 1):
                cut = dataclasses.replace(plan, boundaries=(0, *cuts, count))
                yield predict(cut, found, space.batch, parts=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_search_finds_the_best_of_all_plans(seed):
    """A plan wherever one fits, and within 5% of the best; with more memory it is no slower."""
    draw = random.Random(seed)
    found, space = (
        stack(draw),
        SearchSpace(draw.choice((2, 3)), 4, schedules=("1f1b", "zb_h2", "zb_v")),
    )
    # Only with a limit plans cut weights over replicas.
    forecasts = list(every(found, dataclasses.replace(space, memory=1e18)))
    needed = sorted(max(each.memory) for each in forecasts)
    last = float("inf")
    for limit in (needed[0], needed[len(needed) // 5], None):
        limited = dataclasses.replace(space, memory=limit)
        best = min(e.seconds for e in forecasts if limit is None or max(e.memory) <= limit)
        chosen = search(found, limited, seconds=30, count=3)[0]
        assert limit is None or max(chosen.memory) <= limit
        assert best * (1 - 1e-9) <= chosen.seconds <= 1.05 * best
        assert chosen.seconds <= last * (1 + 1e-9)
        last = chosen.seconds
