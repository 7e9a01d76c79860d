"""Figures adjusted until forecasts agree with measured steps."""

import math

import pytest

from pipemesh.errors import PlanError
from pipemesh.plan import Plan
from pipemesh.plan.calibration import Measured, _moved, fitted
from pipemesh.plan.figures import Curve, Figures, LayerFigures
from pipemesh.plan.network import Link
from pipemesh.plan.predict import predict
from tests.plan.stacks import figures, layer, line

LAYERS = figures().layers
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


def test_fitted_figures_forecast_other_plans():
    truth = Figures(LAYERS, 0.4, 2.0, 0.05, transfer=Link(0.3, 4.0), cores=1.7)
    # Of links nothing is known, and the rest was measured.
    start = Figures(LAYERS, 0.35, 1.8, 0.06, transfer=Link(0.05, 50.0), cores=2.0)
    steps = [Measured(plan, 8, predict(plan, truth, 8).seconds) for plan in PLANS]
    found = fitted(start, steps)
    for plan in (*PLANS, *OTHERS):
        wanted = predict(plan, truth, 8).seconds
        assert predict(plan, found, 8).seconds == pytest.approx(wanted, rel=0.05)
    # And was far from it before.
    errors = [predict(p, start, 8).seconds / predict(p, truth, 8).seconds for p in OTHERS]
    assert max(abs(error - 1) for error in errors) > 0.1


def test_absent_values_stay_absent():
    found = fitted(Figures(LAYERS), [Measured(PLANS[0], 8, 100.0)])
    assert (found.action, found.fixed, found.cores) == (0, 0, None)
    assert found.transfer == Link(0.0, float("inf"))
    assert predict(PLANS[0], found, 8).seconds == pytest.approx(100.0, rel=0.01)


def test_a_step_that_takes_no_time_is_an_error():
    with pytest.raises(PlanError, match="took 0 seconds"):
        fitted(Figures(LAYERS), [Measured(PLANS[0], 8, 0)])


def test_cores_that_layers_keep_busy_are_fitted():
    """By what steps take and by what all cores do in them."""
    start = Figures((layer(work={"F": line(), "B": line(1.5)}),) * 4, cores=4.0)
    steps = [
        step
        for plan in PLANS[:3]
        for step in [
            Measured(plan, 8, predict(plan, start, 8).seconds * 1.2),
            Measured(plan, 8, predict(plan, start, 8).work * 1.5, is_work=True),
        ]
    ]
    found = fitted(start, steps)
    plan = PLANS[0]
    assert predict(plan, found, 8).seconds == pytest.approx(1.2 * 64, rel=0.03)
    assert predict(plan, found, 8).work == pytest.approx(1.5 * 80, rel=0.03)


@pytest.mark.parametrize("crowding", [0.1, 0.9])
def test_how_much_devices_lose_to_each_other_is_fitted(crowding):
    truth = Figures(LAYERS, cores=2.0, crowding=crowding)
    start = Figures(LAYERS, cores=2.0, crowding=0.5)
    steps = [Measured(plan, 8, predict(plan, truth, 8).seconds) for plan in PLANS]
    assert fitted(start, steps).crowding == pytest.approx(crowding, abs=0.1)
    # One that is 0, or 1, was not to be moved.
    assert fitted(Figures(LAYERS, cores=2.0), steps).crowding == 0


def test_unsteady_steps_count_less():
    steps = [Measured(PLANS[0], 8, 100.0), Measured(PLANS[0], 8, 300.0, spread=3.0)]
    found = fitted(Figures(LAYERS), steps)
    assert predict(PLANS[0], found, 8).seconds == pytest.approx(100.0, rel=0.02)


def test_fixed_cost_of_layers_is_fitted():
    """As where a clock takes some time itself, and more on one core."""

    def layers(seconds, work):
        def lines(start):
            return {kind: Curve(((1, start + 1.0), (8, start + 8.0))) for kind in "FB"}

        of_lines = LayerFigures("a", lines(seconds), 0, line(), line(), work=lines(work))
        return Figures((of_lines,) * 4, cores=2.0)

    truth, start = layers(1.0, 1.5), layers(2.0, 4.0)
    steps = [
        step
        for plan in PLANS
        for told in [predict(plan, truth, 8)]
        for step in (
            Measured(plan, 8, told.seconds),
            Measured(plan, 8, told.work, is_work=True),
        )
    ]
    found = fitted(start, steps)
    for plan in (*PLANS, *OTHERS):
        for name in ("seconds", "work"):
            was = getattr(predict(plan, truth, 8), name)
            told = getattr(predict(plan, found, 8), name)
            assert told == pytest.approx(was, rel=0.06), (plan, name)
    assert predict(PLANS[1], start, 8).work > 1.5 * predict(PLANS[1], truth, 8).work


def test_a_line_that_falls_begins_no_higher_than_it_is():
    """Few rows that took longer than more by chance: what is moved is that, and not more."""
    falling = Curve(((1, 10.0), (2, 5.0), (8, 20.0)))
    start = Figures((layer(work=dict.fromkeys("FB", falling)),))
    (longer,) = _moved(start, {"start of work": math.log(1.5)}).layers
    assert [longer.work["F"].at(rows) for rows in (1, 2, 8)] == pytest.approx([15, 10, 25])
