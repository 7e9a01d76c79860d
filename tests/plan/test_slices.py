"""The lengths of slices that take the same work, and forecasts of slices that do not."""

import dataclasses

import pytest

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import figures_of_costs
from pipemesh.plan.slices import Progress, equal_work_lengths

# The work of eight equal parts of a row: the same for each, or growing as attention's does.
EVEN, GROWING = [1.0] * 8, [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]


@pytest.mark.parametrize(
    ("work", "length", "slices", "multiple", "wanted"),
    [
        (EVEN, 16, 4, 1, (4, 4, 4, 4)),
        ([], 9, 3, 1, (3, 3, 3)),
        ([0.0] * 3, 6, 2, 1, (3, 3)),
        # Of a share x of the positions the work is x squared, and lines between eighths.
        (GROWING, 1000, 2, 1, (705, 295)),
        (GROWING, 64, 4, 8, (32, 16, 8, 8)),
        # Nothing is left out, and no slice is empty.
        ([0.0, 0.0, 0.0, 1.0], 4, 4, 1, (1, 1, 1, 1)),
        (GROWING, 7, 1, 7, (7,)),
    ],
)
def test_slices_take_the_same_work(work, length, slices, multiple, wanted):
    assert equal_work_lengths(Progress(work), length, slices, multiple) == wanted


@pytest.mark.parametrize(
    ("length", "slices", "multiple", "message"),
    [
        (
            4,
            5,
            1,
            "seq1f1b:5:equal_work cuts sequences of 4 positions into 5 slices .* Use at most 4",
        ),
        (10, 2, 4, "into 2 slices of whole multiples of 4. Use a length that 4 divides"),
    ],
)
def test_impossible_cut_is_refused(length, slices, multiple, message):
    with pytest.raises(PlanError, match=message):
        equal_work_lengths(Progress(EVEN), length, slices, multiple)


def test_progress_and_its_inverse_agree():
    progress = Progress(GROWING)
    for share in (0.0, 0.1, 0.5, 0.99, 1.0):
        assert progress.at(progress.where(share)) == pytest.approx(share)
    assert progress.at(0.5) == pytest.approx(0.25)
    assert Progress(EVEN).is_even and not progress.is_even


def forecast(schedule, work=GROWING, positions=1024):
    layers = figures_of_costs([LayerCost(1.0, activation_bytes=100.0)] * 2, rows=1)
    layers = [dataclasses.replace(layer, row_work=tuple(work)) for layer in layers]
    figures = Figures(tuple(layers), positions=positions)
    assert Figures.from_json(figures.to_json(), "text") == figures
    return predict(
        Plan("layers:2", schedule=schedule, num_microbatches=1, remat="none"), figures, 1
    )


def test_forecast_knows_lengths_and_work_of_slices():
    equal_length, equal_work = forecast("seq1f1b:2"), forecast("seq1f1b:2:equal_work")
    # Two stages of 3 seconds. The second slice of the same length takes three quarters of it, and
    # the first stage waits for the whole of it: F0.0, then F0.1 here and there, and back.
    assert equal_length.seconds == pytest.approx(3 + 3 * 3 / 4)
    assert equal_work.seconds == pytest.approx(3 + 3 / 2, rel=1e-2)
    assert equal_length.parts["imbalance"] == pytest.approx(3 / 4)
    # The second stage holds one whole row, whatever its slices are.
    assert equal_work.memory[1] == pytest.approx(equal_length.memory[1])
    # Where all positions take the same, both are one plan.
    same = [forecast(name, EVEN) for name in ("seq1f1b:2", "seq1f1b:2:equal_work")]
    assert same[0].seconds == same[1].seconds == pytest.approx(3 + 3 / 2)
