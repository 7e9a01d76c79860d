"""Intervals of checkpoints: closed forms, their limits, and a simulation with no formula in it."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PlanError
from pipemesh.plan.many_devices import Failures, simulate_failures

any_failures = st.builds(Failures, st.floats(60, 1e7), st.floats(0.1, 600), st.floats(0, 600))


@given(any_failures, st.floats(0.05, 20))
def test_no_interval_is_better_than_the_best(failures, factor):
    other = failures.goodput(failures.best * factor)
    assert other <= failures.goodput(failures.best) * (1 + 1e-9)


@given(any_failures)
def test_the_best_interval_solves_its_equation(failures):
    """Where the derivative of the goodput is 0: exp(x + d) (1 - x) = 1."""
    x, d = failures.best / failures.between, failures.save / failures.between
    assert math.exp(x + d) * (1 - x) == pytest.approx(1, rel=1e-6, abs=1e-6)


@given(st.floats(1e3, 1e8), st.floats(1e-4, 1e-2))
def test_young_and_daly_are_its_limits(between, share):
    """Where saving is short against the time between failures, with the errors of their orders."""
    failures = Failures(between, share * between, 0.0)
    assert failures.daly == pytest.approx(failures.best, rel=2 * share)
    assert failures.young == pytest.approx(failures.best, rel=1.5 * math.sqrt(share))
    # Young's is too long: what is written is no work.
    assert failures.young > failures.best


def test_daly_has_a_figure_of_his_own():
    """Beyond two times between failures there is no better interval than that between failures."""
    assert Failures(100.0, 200.0, 0.0).daly == 100.0
    assert Failures(100.0, 199.0, 0.0).daly < 100.0


@pytest.mark.parametrize(
    ("between", "save", "restart", "devices"),
    [(3600.0, 30.0, 120.0, 1), (3600.0, 30.0, 120.0, 50), (600.0, 60.0, 90.0, 7)],
)
def test_the_closed_form_is_the_mean_of_simulations(between, save, restart, devices):
    failures = Failures(between, save, restart)
    for interval in (failures.best, failures.best * 2.5):
        expected = failures.goodput(interval)
        pieces = 4000
        runs = [simulate_failures(failures, interval, pieces, devices, seed) for seed in range(8)]
        # Times add up, so means are of times.
        mean = statistics.fmean(run.seconds for run in runs)
        error = statistics.stdev(run.seconds for run in runs) / math.sqrt(len(runs))
        assert mean == pytest.approx(pieces * interval / expected, abs=4 * error)
        assert mean == pytest.approx(pieces * interval / expected, rel=0.02)


def test_failures_come_as_often_as_they_should():
    failures = Failures(1000.0, 10.0, 20.0)
    run = simulate_failures(failures, 100.0, 5000, num_devices=16)
    assert run.failures == pytest.approx(run.seconds / 1000.0, rel=0.05)
    # Each loses half a piece or so, and never more than one.
    assert 0.3 * 110 < run.lost / run.failures < 0.6 * 110


def test_a_simulation_is_the_same_again():
    failures = Failures(1000.0, 10.0, 20.0)
    assert simulate_failures(failures, 100.0, 50) == simulate_failures(failures, 100.0, 50)
    assert simulate_failures(failures, 100.0, 50) != simulate_failures(failures, 100.0, 50, seed=1)


def test_what_cannot_be_done_is_done_never():
    failures = Failures(1.0, 1000.0, 1000.0)
    assert failures.goodput(failures.best) == 0
    assert Failures(1e6, 0.0, 0.0).best == 0
    assert Failures(1e6, 0.0, 1e6).goodput(0) == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("numbers", [(0, 1, 1), (-1, 1, 1), (1, math.nan, 1), (1, 1, math.inf)])
def test_numbers_have_to_be_seconds(numbers):
    with pytest.raises(PlanError):
        Failures(*numbers)


def test_an_interval_has_to_be_one():
    failures = Failures(100.0, 1.0, 1.0)
    with pytest.raises(PlanError, match="it must be above 0"):
        failures.goodput(0)
    with pytest.raises(PlanError, match="pieces 0"):
        simulate_failures(failures, 1.0, 0)
