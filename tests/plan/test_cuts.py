"""Cuts that fit into memory; `test_random_plans.py` holds them against all cuts."""

import math

from pipemesh.partition import LayerCost
from pipemesh.plan import Asked, Figures, Plan, predict
from pipemesh.plan.cuts import cut_to_fit, fits, with_better_cuts
from pipemesh.plan.layer_figures import figures_of_costs


def test_layers_are_cut_by_memory_where_seconds_need_too_much():
    seconds, kept = (1e-3, 1e-3, 2e-3), (4e6, 4e6, 1e6)
    costs = [LayerCost(forward=s, activation_bytes=k) for s, k in zip(seconds, kept, strict=True)]
    figures = Figures(tuple(figures_of_costs(costs, 1)))
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 2, 3), remat="none")
    tight, asked = predict(plan, figures, 4), Asked(2, 4, 10e6)
    assert not fits(tight, asked)
    for found in (
        cut_to_fit(tight, figures, asked),
        with_better_cuts(tight, figures, asked, math.inf),
    ):
        assert fits(found, asked) and found.plan.boundaries == (0, 1, 3)
