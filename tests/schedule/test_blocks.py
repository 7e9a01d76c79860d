"""Even blocks: no two steps of a device meet, and they hold what is allowed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule.blocks import even_blocks
from pipemesh.schedule.placement import loop, vee

WAYS = st.sampled_from([loop, vee, lambda d: loop(d, 2)])


@settings(max_examples=40)
@given(WAYS, st.integers(1, 8), st.integers(2, 16))
def test_no_two_steps_of_a_device_meet(placed, num_devices, limit):
    placement = placed(num_devices)
    devices = (*placement, *reversed(placement))
    for period, offsets in even_blocks(placement, num_devices, [limit] * num_devices, 4):
        assert len(offsets) == len(devices) and list(offsets) == sorted(offsets)
        slots = {(d, t % period) for d, t in zip(devices, offsets, strict=True)}
        assert len(slots) == len(devices)
        # There is a tick left for every weight gradient.
        assert period >= 3 * len(placement) // num_devices


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
