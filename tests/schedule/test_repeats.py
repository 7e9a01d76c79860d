"""Loops stand for exactly the actions that they replace."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, execution_order
from pipemesh.schedule.builders import BUILDERS, SLICED, build
from pipemesh.schedule.repeats import Loop, find_loops


def written_out(items):
    for item in items:
        if isinstance(item, Action):
            yield item
            continue
        for repetition in range(item.count):
            for a in item.body:
                yield dataclasses.replace(a, microbatch=a.microbatch + repetition * item.shift)


def length(items):
    return sum(len(item.body) if isinstance(item, Loop) else 1 for item in items)


@hypothesis.given(
    name=st.sampled_from(sorted(BUILDERS | SLICED)),
    devices=st.integers(1, 5),
    microbatches=st.integers(1, 40),
)
def test_written_out_they_are_the_order_itself(name, devices, microbatches):
    try:
        order = execution_order(build(name, devices, microbatches))
    except ScheduleError:
        hypothesis.reject()
    assert tuple(written_out(find_loops(order))) == order


@hypothesis.given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6)), max_size=60))
def test_any_sequence_at_all_can_be_written_back(cells):
    order = tuple(Action(stage, "F", m) for stage, m in cells)
    assert tuple(written_out(find_loops(order))) == order


@pytest.mark.parametrize("name", BUILDERS | SLICED)
def test_number_of_microbatches_does_not_change_the_length(name):
    lengths = {length(find_loops(execution_order(build(name, 4, m)))) for m in (64, 128)}
    assert len(lengths) == 1


def test_labels_tell_actions_apart():
    order = [Action(0, "F", m) for m in range(12)]
    assert find_loops(order) == (Loop((order[0],), 12, 1),)
    halves = find_loops(order, lambda action: action.microbatch < 6)
    assert [item.count for item in halves] == [6, 6]
