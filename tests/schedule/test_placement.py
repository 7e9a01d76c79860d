"""Where stages lie: on a loop and on a V."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule.placement import loop, vee


def test_small_ones_by_hand():
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)


@given(st.integers(1, 9), st.integers(1, 4))
def test_on_a_loop_the_next_stage_is_on_the_next_device(num_devices, rounds):
    placed = loop(num_devices, rounds)
    assert [placed.count(device) for device in range(num_devices)] == [rounds] * num_devices
    assert placed[0] == 0
    for here, there in itertools.pairwise(placed):
        assert there == (here + 1) % num_devices


@given(st.integers(1, 9))
def test_a_v_comes_back_the_way_it_went_and_turns_without_a_transfer(num_devices):
    placed = vee(num_devices)
    assert placed == placed[::-1]
    assert placed[:num_devices] == loop(num_devices)
