"""Scales show all of what they are for, and have round numbers on them."""

import math

import pytest

from pipemesh.report.scale import Scale, short

RANGES = [
    (0.0, 0.0),
    (3.0, 3.0),
    (-2.0, 5.0),
    (2.5, 7.1),
    (0.9, 1.0),
    (1e-5, 1e-3),
    (1.0, 1e30),
    (20.0, 700.0),
    (-1e-9, 0.0),
    (1e200, 1e201),
]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_everything_lies_on_its_scale(low, high):
    scale = Scale.of([high, low])
    assert 0 <= scale.share(low) <= scale.share(high) <= 1 + 1e-9
    ticks = scale.ticks(6)
    assert 2 <= len(ticks) <= 13 and ticks == sorted(set(ticks))
    for tick in ticks:
        assert -1e-9 <= scale.share(tick) <= 1 + 1e-9
        # Round: at most two digits.
        assert math.isclose(float(f"{tick:.1e}"), tick, abs_tol=1e-12) or len(f"{tick:g}") <= 5


def test_what_is_positive_does_not_begin_below_0():
    scale = Scale.of([0.0, 1.9])
    assert scale.low == scale.ticks(6)[0] == 0 and scale.high > 1.9


def test_bars_begin_at_0():
    assert Scale.of([3.0, 8.0], from_zero=True) == Scale(0.0, 8.0)
    assert Scale.of([], from_zero=True).high > 0 and Scale.of([0.0], from_zero=True).high > 0


def test_ratios_that_are_large_are_logarithmic():
    assert Scale.of([1.0, 100.0]).logarithmic
    assert not Scale.of([0.0, 100.0]).logarithmic and not Scale.of([5.0, 9.0]).logarithmic


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0"), (1e-5, "1e-05"), (999.96, "1000"), (5e6, "5M"), (3e9, "3G"), (1e15, "1e+15")],
)
def test_numbers_are_short(value, told):
    assert short(value) == told
