"""The clock of a pipeline whose activations circle."""

import itertools

import pytest

from pipemesh.recurrent.circular.ticks import TickPlan

PLANS = [TickPlan(*sizes) for sizes in itertools.product((1, 2, 4), (1, 3, 4, 8), (1, 2, 3))]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_stage_works_on_every_microbatch_once_and_after_the_stage_before(plan):
    ticks = {}
    for stage, tick in itertools.product(range(plan.num_stages), range(plan.num_ticks)):
        circle, microbatch, busy = plan.at(stage, tick)
        if busy:
            assert (circle, stage, microbatch) not in ticks
            ticks[circle, stage, microbatch] = tick
    assert len(ticks) == plan.num_circles * plan.num_stages * plan.num_microbatches
    for (circle, stage, microbatch), tick in ticks.items():
        if stage:
            assert ticks[circle, stage - 1, microbatch] == tick - 1
        elif circle:
            # It waits in its slot for its turn.
            assert ticks[circle - 1, plan.num_stages - 1, microbatch] < tick
    busy = len(ticks) / (plan.num_stages * plan.num_ticks)
    assert plan.bubble == pytest.approx(1 - busy)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_slot_is_taken_before_the_next_circle_overwrites_it(plan):
    read = {}
    for tick in range(plan.num_ticks):
        circle, slot, busy = plan.at(0, tick)
        if busy:
            read[circle, slot] = tick
    for tick in range(plan.num_ticks):
        circle, slot, writes = plan.at(plan.num_stages - 1, tick)
        if writes:
            assert read[circle, slot] <= tick
            assert read.get((circle + 1, slot), plan.num_ticks) > tick


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [((4, 8, 1), 11), ((4, 8, 2), 19), ((1, 4, 2), 8), ((2, 2, 3), 7), ((4, 1, 1), 4)],
)
def test_ticks_are_those_of_the_formula(sizes, ticks):
    stages, microbatches, circles = sizes
    assert TickPlan(*sizes).num_ticks == ticks == microbatches * circles + stages - 1


def test_with_fewer_microbatches_than_stages_the_first_core_waits_for_each_circle():
    assert TickPlan(4, 1, 2).num_ticks == 8
    assert TickPlan(4, 3, 2).num_ticks == 4 + 3 + 4 - 1
