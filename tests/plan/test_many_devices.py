"""A training on more devices than there are."""

import contextlib
import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PlanError, ScheduleError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan
from pipemesh.plan.figures import figures_of_costs
from pipemesh.plan.many_devices import (
    Failures,
    Job,
    Reliability,
    Split,
    best_step,
    forecast,
    forecast_step,
    simulate_failures,
    splits,
)
from pipemesh.plan.network import Link, Network

LAYERS = tuple(figures_of_costs([LayerCost(1.0, parameter_bytes=3)] * 2, 1))
HOSTS = Network(8, Link(0.0, 1.0), Link(0.0, 1.0))


def test_a_split_names_its_mesh_as_plans_do():
    split = Split(layers=4, data=2, model=8)
    assert split.num_devices == 64
    assert Plan(split.mesh, "batch:data;d_ff:model").mesh.num_devices == 64
    assert Split(1).mesh == "layers:1"


def test_weights_count_once():
    assert Job(LAYERS, HOSTS, 8).parameter_bytes == 6


@pytest.mark.parametrize(("layers", "batch"), [((), 8), (LAYERS, 0)])
def test_there_has_to_be_something_to_train(layers, batch):
    with pytest.raises(PlanError, match="must be one of each"):
        Job(layers, HOSTS, batch)


FREE = Network(8, Link(0.0, 1e30), Link(0.0, 1e30))


def job(layers=8, network=FREE, batch=32, split=8, **more):
    costs = [
        LayerCost(
            1.0,
            backward=2.0,
            parameter_bytes=1e6,
            activation_bytes=1e6,
            boundary_bytes=1e6,
            name="a",
        )
    ] * layers
    figures = figures_of_costs(costs, 1, split=split, summed=[1e6] * layers)
    return Job(tuple(figures), network, batch, **more)


def test_boundaries_inside_a_host_are_fast():
    slow = Network(2, Link(0.0, 1e30), Link(0.0, 1e6))
    across = forecast_step(job(network=slow), Split(2, data=2, num_microbatches=16))
    inside = forecast_step(job(network=slow), Split(2, num_microbatches=16))
    assert inside.parts["transfers"] == 0 < across.parts["transfers"]


NETWORK = Network(4, Link(1e-6, 1e11), Link(1e-5, 1e9))


def small_job(batch=64, layers=8, memory=None):
    costs = [
        LayerCost(
            1e-3, backward=2e-3, parameter_bytes=4e7, activation_bytes=1e7, boundary_bytes=1e6
        )
    ] * layers
    figures = figures_of_costs(costs, 1, split=4, summed=[2e6] * layers)
    return Job(tuple(figures), NETWORK, batch, memory, action=1e-4)


def test_all_splits_use_all_devices():
    found = list(splits(small_job(), 16))
    assert {split.num_devices for split in found} == {16}
    assert len(set(found)) == len(found)
    assert {split.model for split in found} == {1, 2, 4}
    assert all(64 % (split.data * split.num_microbatches) == 0 for split in found)


def test_slices_may_lie_on_several_hosts():
    """Layers of 8 slices on hosts of 4: their sums use the links inside and between hosts."""
    layers = tuple(
        dataclasses.replace(layer, shares={"": dataclasses.replace(layer.shares[""], most=8)})
        for layer in small_job().layers
    )
    wide = dataclasses.replace(small_job(), layers=layers)
    assert {split.model for split in splits(wide, 16)} == {1, 2, 4, 8}
    found = forecast_step(wide, Split(1, data=2, model=8, num_microbatches=4))
    # Twice for each of 8 layers and 4 microbatches of 8 rows.
    sums = 8 * 2 * 4 * NETWORK.all_reduce(8, 1, 8 * 2e6)
    assert found.parts["sums"] == pytest.approx(sums)


def test_the_best_of_some_is_near_the_best_of_all():
    """What the formula leaves aside is seldom better: here all splits are simulated."""
    steps = []
    for split in splits(small_job(32, 4), 8):
        # Some tables are for other numbers of microbatches.
        with contextlib.suppress(ScheduleError):
            steps.append(forecast_step(small_job(32, 4), split))
    for memory in (None, 3e8):
        found, _ = best_step(small_job(32, 4, memory), 8)
        best = min(s.seconds for s in steps if memory is None or s.fullest <= memory)
        assert best <= found.seconds <= 1.02 * best


def test_steps_above_memory_are_left_out():
    endless, tight = best_step(small_job(), 8)
    assert tight == 1
    limited, tight = best_step(small_job(memory=endless.fullest * 0.6), 8)
    assert limited.fullest <= endless.fullest * 0.6
    assert tight == pytest.approx(limited.seconds / endless.seconds) and tight >= 1
    with pytest.raises(PlanError, match="the leanest needs"):
        best_step(small_job(memory=1e6), 8)


def test_more_devices_than_rows_and_layers_are_an_error():
    with pytest.raises(PlanError, match="4096 devices cannot share 8 layers"):
        best_step(small_job(batch=4), 4096)


def test_more_devices_fail_more_often():
    reliability = Reliability(device=1e7, storage=1e9)
    few, many = (forecast(small_job(), number, reliability) for number in (4, 64))
    assert few.failures.between == 16 * many.failures.between
    # As many hosts write their slices at once.
    assert few.failures.save == 16 * many.failures.save
    # Devices of a host write together, however few of it are used.
    saves = [reliability.failures(small_job(), number).save for number in (4, 5, 8, 9)]
    assert saves == [saves[0], saves[0] / 2, saves[0] / 2, saves[0] / 3]
    assert 0 < many.goodput < few.goodput < 1
    assert many.interval == pytest.approx(
        round(many.interval / many.step.seconds) * many.step.seconds
    )
    assert forecast(small_job(), 4).goodput == 1


def test_binding_cost_is_named():
    """Of devices that hardly fail slow links cost most, and of others their failures."""
    slow = Network(1, Link(1e-6, 1e11), Link(1e-5, 1e7))
    assert forecast(Job(small_job().layers, slow, 64), 8).binds in ("gradients", "transfers")
    free = Network(1, Link(0.0, 1e30), Link(0.0, 1e30))
    found = forecast(Job(small_job().layers, free, 64), 2, Reliability(device=2e3, storage=1e9))
    assert found.binds == "failures"


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


def test_goodput_of_extreme_failures():
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
