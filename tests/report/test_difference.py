"""The parts of a measured step add up, and each is the thing that it is named after."""

import random

import pytest

from pipemesh.report import parts_of
from pipemesh.report.difference import waits_of
from pipemesh.schedule import Costs, Timeline, gpipe, one_f_one_b, simulate, zb_v

NAMES = ["work", "filling and draining", "imbalance", "variation", "overhead", "transfers"]


def times(measured):
    found = parts_of(measured)
    assert [part.name for part in found if part.name != "overlap"] == NAMES
    assert sum(part.time for part in found) == pytest.approx(measured.makespan)
    return {part.name: part.time for part in found}


def measured(real, costs=None):
    """Returns a step that ran as `real`, with the median durations `costs`."""
    return Timeline(real.schedule, costs or real.costs, real.starts, real.ends)


def test_step_as_simulated_has_no_other_parts():
    found = times(measured(simulate(gpipe(4, 8), Costs(1, 2))))
    assert found["work"] == 24 and found["filling and draining"] == 9
    assert [found[name] for name in NAMES[2:]] == [0] * 4


def test_unequal_stages_are_imbalance():
    found = times(measured(simulate(one_f_one_b(2, 4), Costs([1, 3], [2, 6]))))
    assert found["work"] == 24 and found["imbalance"] > 0
    assert [found[name] for name in NAMES[3:]] == [0] * 3


def test_transfers_are_transfers():
    costs = Costs(1, 2)
    found = times(measured(simulate(gpipe(2, 3), Costs(1, 2, transfer=0.25)), costs))
    assert found["transfers"] == pytest.approx(0.5)
    assert [found[name] for name in NAMES[2:5]] == [0] * 3


def test_early_start_is_overlap():
    """The second stage begins with first results, 0.5 before the first stage's actions end."""
    real = simulate(gpipe(2, 2), Costs(1, 2))
    early = tuple(time - 0.5 for time in real.starts[1]), tuple(time - 0.5 for time in real.ends[1])
    starts, ends = (
        (rows[0], row) for rows, row in zip((real.starts, real.ends), early, strict=True)
    )
    found = times(Timeline(real.schedule, real.costs, starts, ends))
    assert found["overhead"] >= 0 and found["transfers"] >= 0 > found["overlap"]


def test_pauses_on_a_device_are_overhead():
    real = simulate(gpipe(1, 2), Costs(1, 2))
    starts = tuple(tuple(time + 0.5 * n for n, time in enumerate(row)) for row in real.starts)
    ends = tuple(tuple(time + 0.5 * n for n, time in enumerate(row)) for row in real.ends)
    found = times(Timeline(real.schedule, real.costs, starts, ends))
    assert found["overhead"] == pytest.approx(1.5) and found["transfers"] == 0


def test_slow_actions_are_variation():
    real = simulate(gpipe(1, 4), Costs(1, 2))

    def late(row, n):
        return tuple(time + (3 if tick >= n else 0) for tick, time in enumerate(row))

    starts, ends = ((late(rows[0], n),) for rows, n in ((real.starts, 3), (real.ends, 2)))
    found = times(Timeline(real.schedule, real.costs, starts, ends))
    assert found["variation"] == pytest.approx(3)
    assert found["overhead"] == found["transfers"] == pytest.approx(0)


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 5), one_f_one_b(4, 8), zb_v(4, 8)], ids=["gpipe", "1f1b", "zb_v"]
)
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_any_step_add_up(schedule, seed):
    draw = random.Random(seed)
    usual = [draw.uniform(1, 2) for _ in range(schedule.num_stages)]
    costs = Costs(usual, input_grad=usual, weight_grad=usual)
    late = Costs(usual, input_grad=usual, weight_grad=usual, transfer=draw.uniform(0, 0.5))
    found = times(measured(simulate(schedule, late, jitter=0.3, seed=seed), costs))
    assert found["work"] > 0 and found["transfers"] > 0


def test_waits_are_own_or_for_transfers():
    found = waits_of(simulate(one_f_one_b(2, 4), Costs(1, 2, transfer=0.25)))
    assert (found.own, found.sent) == (0, pytest.approx(0.25))
    real = simulate(gpipe(1, 2), Costs(1, 2))
    starts, ends = (
        (tuple(time + 0.5 * n for n, time in enumerate(row)),)
        for (row,) in (real.starts, real.ends)
    )
    found = waits_of(Timeline(real.schedule, real.costs, starts, ends))
    assert (found.own, found.sent) == (pytest.approx(0.5 * 3 / 4), 0)


def test_early_start_is_no_wait():
    real = simulate(gpipe(2, 1), Costs(1, 2))
    early = [list(row) for row in real.starts]
    early[1][0] -= 0.5
    found = waits_of(Timeline(real.schedule, real.costs, tuple(map(tuple, early)), real.ends))
    assert (found.own, found.sent) == (0, 0)
