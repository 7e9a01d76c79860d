"""The best way to use many devices, and what failures leave of it."""

import contextlib

import pytest

from pipemesh.errors import PlanError, ScheduleError
from pipemesh.partition import LayerCost
from pipemesh.plan.layer_figures import figures_of_costs
from pipemesh.plan.network import Link, Network
from pipemesh.scale import Job, Reliability, best_step, forecast, forecast_step, splits

NETWORK = Network(4, Link(1e-6, 1e11), Link(1e-5, 1e9))


def job(batch=64, layers=8, memory=None):
    costs = [
        LayerCost(
            1e-3, backward=2e-3, parameter_bytes=4e7, activation_bytes=1e7, boundary_bytes=1e6
        )
    ] * layers
    figures = figures_of_costs(costs, 1, split=4, summed=[2e6] * layers)
    return Job(tuple(figures), NETWORK, batch, memory, action=1e-4)


def test_all_splits_use_all_devices():
    found = list(splits(job(), 16))
    assert {split.num_devices for split in found} == {16}
    assert len(set(found)) == len(found)
    assert {split.model for split in found} == {1, 2, 4}
    assert all(64 % (split.data * split.num_microbatches) == 0 for split in found)


def test_the_best_of_some_is_near_the_best_of_all():
    """What the formula leaves aside is seldom better: here all splits are simulated."""
    steps = []
    for split in splits(job(), 8):
        # Some tables are for other numbers of microbatches.
        with contextlib.suppress(ScheduleError):
            steps.append(forecast_step(job(), split))
    for memory in (None, 3e8):
        found, _ = best_step(job(memory=memory), 8)
        best = min(s.seconds for s in steps if memory is None or s.fullest <= memory)
        assert best <= found.seconds <= 1.02 * best


def test_what_does_not_fit_is_not_taken():
    endless, tight = best_step(job(), 8)
    assert tight == 1
    limited, tight = best_step(job(memory=endless.fullest * 0.6), 8)
    assert limited.fullest <= endless.fullest * 0.6
    assert tight == pytest.approx(limited.seconds / endless.seconds) and tight >= 1
    with pytest.raises(PlanError, match="the leanest needs"):
        best_step(job(memory=1e6), 8)


def test_more_devices_than_rows_and_layers_are_an_error():
    with pytest.raises(PlanError, match="4096 devices cannot share 8 layers"):
        best_step(job(batch=4), 4096)


def test_more_devices_fail_more_often():
    reliability = Reliability(device=1e7, storage=1e9)
    few, many = (forecast(job(), number, reliability) for number in (4, 64))
    assert few.failures.between == 16 * many.failures.between
    # As many hosts write their slices at once.
    assert few.failures.save == 16 * many.failures.save
    # Devices of a host write together, however few of it are used.
    saves = [reliability.failures(job(), number).save for number in (4, 5, 8, 9)]
    assert saves == [saves[0], saves[0] / 2, saves[0] / 2, saves[0] / 3]
    assert 0 < many.goodput < few.goodput < 1
    assert many.interval == pytest.approx(
        round(many.interval / many.step.seconds) * many.step.seconds
    )
    assert forecast(job(), 4).goodput == 1


def test_what_binds_is_said():
    """Of devices that hardly fail slow links cost most, and of others their failures."""
    slow = Network(1, Link(1e-6, 1e11), Link(1e-5, 1e7))
    assert forecast(Job(job().layers, slow, 64), 8).binds in ("gradients", "transfers")
    free = Network(1, Link(0.0, 1e30), Link(0.0, 1e30))
    found = forecast(Job(job().layers, free, 64), 2, Reliability(device=2e3, storage=1e9))
    assert found.binds == "failures"
