"""1F1B on slices of sequences: its order, its bubble and what it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, one_f_one_b, seq_one_f_one_b, simulate, validate

ORDER = """
0: 0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0F2.0 0B0.0 0F2.1 0B1.1 0B1.0 0B2.1 0B2.0
1: 1F0.0 1F0.1 1F1.0 1B0.1 1F1.1 1B0.0 1F2.0 1B1.1 1F2.1 1B1.0 1B2.1 1B2.0
2: 2F0.0 2F0.1 2B0.1 2F1.0 2B0.0 2F1.1 2B1.1 2F2.0 2B1.0 2F2.1 2B2.1 2B2.0
""".strip()


def test_three_devices_cell_by_cell():
    """First microbatch first, of each the last slice first: the paper's partially ordered queue."""
    assert str(seq_one_f_one_b(3, 3, 2)) == ORDER


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 6))
def test_bubble_and_what_is_held_are_the_formulas(num_devices, num_microbatches, num_slices):
    schedule = validate(seq_one_f_one_b(num_devices, num_microbatches, num_slices))
    assert schedule.num_slices == num_slices
    num_pieces = num_microbatches * num_slices
    held = tuple(min(num_pieces, num_devices - d - 1 + num_slices) for d in range(num_devices))
    whole = Costs(forward=num_slices, backward=2 * num_slices)
    timeline = simulate(schedule, whole.refined(1, num_slices))
    assert timeline.peak_activations == held
    assert timeline.bubble == pytest.approx([3 * (num_devices - 1)] * num_devices)


def test_four_slices_at_eight_devices():
    """The bubble is a quarter of that of 1F1B, at a third of its memory."""
    timeline = simulate(seq_one_f_one_b(8, 32, 4), Costs(forward=1, backward=2).refined(1, 4))
    assert timeline.makespan == 101.25
    assert timeline.bubble_ratio <= 0.06
    assert max(timeline.peak_activations) / 4 == 2.75
    assert timeline.above_bound < 0.03


def test_one_slice_is_one_f_one_b():
    assert seq_one_f_one_b(3, 5, 1) == one_f_one_b(3, 5)


def test_no_slices_are_an_error():
    with pytest.raises(ScheduleError, match="num_slices is 0; it must be at least 1"):
        seq_one_f_one_b(2, 2, 0)
