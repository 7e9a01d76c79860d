"""Even blocks: no two steps of a device meet, and they hold what is allowed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule import simulate, validate
from pipemesh.schedule.blocks import even_blocks, repeated
from pipemesh.schedule.schedule import loop, vee

PLACEMENTS = {"one stage": loop, "loop": lambda d: loop(d, 2), "v": vee}


@settings(max_examples=20)
@given(st.data(), st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 4), st.integers(1, 9))
def test_no_two_steps_meet_and_every_way_keeps_the_limits(data, name, num_devices, microbatches):
    placement = PLACEMENTS[name](num_devices)
    devices = (*placement, *reversed(placement))
    least = len(placement) // num_devices
    limits = [data.draw(st.integers(least, 2 * num_devices + 2)) for _ in range(num_devices)]
    for period, offsets in even_blocks(placement, num_devices, limits, 3):
        assert len(offsets) == len(devices) and list(offsets) == sorted(offsets)
        slots = {(d, t % period) for d, t in zip(devices, offsets, strict=True)}
        assert len(slots) == len(devices)
        # There is a tick left for every weight gradient.
        assert period >= 3 * least
        for schedule in repeated(placement, offsets, period, microbatches, limits):
            assert schedule.num_microbatches == microbatches
            held = simulate(validate(schedule)).peak_activations
            assert all(mine <= limit for mine, limit in zip(held, limits, strict=True))


def test_v_half_and_v_min_are_among_them():
    half = (0, 2, 4, 6, 7, 8, 9, 10, 14, 16, 18, 20, 22, 23, 24, 25)
    assert (6, half) in even_blocks(vee(4), 4, [6] * 4, 100)
    assert (6, tuple(range(16))) in even_blocks(vee(4), 4, [4] * 4, 100)


def test_blocks_that_hold_most_come_first():
    found = even_blocks(vee(4), 4, [8] * 4, 100)
    lives = [
        max(sum(offsets[15 - s] - offsets[s] for s in (d, 7 - d)) for d in range(4))
        for _, offsets in found
    ]
    assert lives == sorted(lives, reverse=True) and lives[0] > lives[-1]
    assert even_blocks(vee(4), 4, [8] * 4, 3) == found[:3]


def test_little_room_makes_the_period_longer():
    assert even_blocks(vee(4), 4, [4] * 4, 1)[0][0] == 6
    assert even_blocks(loop(4, 2), 4, [4] * 4, 1)[0][0] > 6


def test_other_placements_have_none():
    assert even_blocks(loop(2, 3), 2, [9, 9], 5) == []
    assert even_blocks((0, 0, 1, 1), 2, [9, 9], 5) == []
    assert even_blocks((0, 1, 1), 2, [9, 9], 5) == []


@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_a_block_without_gaps_stays_as_it_is(num_microbatches):
    """One device, one stage: F, I, W over and over."""
    for schedule in repeated([0], [0, 1], 3, num_microbatches, [1]):
        expected = " ".join(f"0F{m} 0I{m} 0W{m}" for m in range(num_microbatches))
        assert str(schedule) == f"0: {expected}"


def test_ends_are_filled_within_the_memory():
    """With more room the first device runs ahead, with less it does not."""
    offsets = (0, 1, 2, 4)
    ahead = [
        max(str(s).splitlines()[0].index("I") for s in repeated((0, 1), offsets, 3, 6, [k, k]))
        for k in (2, 4)
    ]
    assert ahead[0] <= ahead[1]
    for schedule in repeated((0, 1), offsets, 3, 6, [2, 1]):
        assert simulate(schedule).peak_activations == (2, 1)


def test_limits_are_kept_where_a_device_waits_for_itself():
    """The V of three devices with room for one microbatch: its first device waits for its own."""
    period, offsets = even_blocks(vee(3), 3, [6, 6, 6], 1)[0]
    for schedule in repeated(vee(3), offsets, period, 5, [2, 2, 2]):
        assert max(simulate(validate(schedule)).peak_activations) <= 2
