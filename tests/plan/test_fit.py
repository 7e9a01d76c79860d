"""Figures that agree with steps that were measured."""

import pytest

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan
from pipemesh.plan.figures import Figures
from pipemesh.plan.fit import Measured, fitted
from pipemesh.plan.layer_figures import figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.plan.predict import predict

LAYERS = tuple(figures_of_costs([LayerCost(1.0, 2.0, 8.0, 4.0, 2.0)] * 4, 1))
PLANS = [
    Plan("layers:1", num_microbatches=1, remat="none"),
    Plan("layers:1", num_microbatches=8, remat="none"),
    Plan("layers:2", num_microbatches=4, remat="none"),
    Plan("layers:1;data:2", "batch:data", num_microbatches=1, remat="none"),
    Plan("layers:4", schedule="zb_h1", num_microbatches=8, remat="none"),
]
OTHERS = [
    Plan("layers:2;data:2", "batch:data", num_microbatches=2, remat="none"),
    Plan("layers:4", num_microbatches=4),
    Plan("layers:2", schedule="gpipe", num_microbatches=2),
]


def test_what_is_fitted_forecasts_other_plans():
    truth = Figures(LAYERS, 0.4, 2.0, 0.05, transfer=Link(0.02, 20.0), cores=1.7)
    start = Figures(LAYERS, 0.1, 1.0, 0.1, transfer=Link(0.05, 50.0), cores=2.0)
    steps = [Measured(plan, 8, predict(plan, truth, 8).seconds) for plan in PLANS]
    found = fitted(start, steps)
    for plan in PLANS:
        assert predict(plan, found, 8).seconds == pytest.approx(
            predict(plan, truth, 8).seconds, rel=0.05
        )
    for plan in OTHERS:
        assert predict(plan, found, 8).seconds == pytest.approx(
            predict(plan, truth, 8).seconds, rel=0.05
        )
    # And was far from it before.
    errors = [predict(p, start, 8).seconds / predict(p, truth, 8).seconds for p in OTHERS]
    assert max(abs(error - 1) for error in errors) > 0.1


def test_what_is_not_there_stays_so():
    found = fitted(Figures(LAYERS), [Measured(PLANS[0], 8, 100.0)])
    assert (found.action, found.fixed, found.cores) == (0, 0, None)
    assert found.transfer == Link(0.0, float("inf"))
    assert predict(PLANS[0], found, 8).seconds == pytest.approx(100.0, rel=0.01)


def test_a_step_that_takes_no_time_is_an_error():
    with pytest.raises(PlanError, match="took 0 seconds"):
        fitted(Figures(LAYERS), [Measured(PLANS[0], 8, 0)])
