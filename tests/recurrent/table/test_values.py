"""Values that actions hand to each other, and the state before the first action."""

import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.table.values import (
    GRADS,
    KEPT,
    OUTPUTS,
    PENDING,
    REMADE,
    Channel,
    Kind,
    Slot,
    State,
    empty_notes,
    given,
    taken,
)


def test_channels_and_slots_are_equal_by_what_they_name():
    assert Channel(Kind("grads"), 1) == Channel(GRADS, 1) != Channel(GRADS, 2)
    slots = {Slot(Channel(kind, 1), m) for kind in (KEPT, PENDING, KEPT) for m in (0, 1)}
    assert len(slots) == 4
    assert {slot.channel for slot in slots} == {Channel(KEPT, 1), Channel(PENDING, 1)}


def test_channels_of_an_action_follow_the_table_of_its_kind():
    assert taken("F", 1, is_recomputed=False) == [Channel(OUTPUTS, 0)]
    assert given("F", 1) == [Channel(OUTPUTS, 1), Channel(KEPT, 1)]
    assert taken("R", 1, is_recomputed=True) == [Channel(KEPT, 1)]
    assert given("R", 1) == [Channel(REMADE, 1)]
    for kind, left in (("B", []), ("I", [Channel(PENDING, 1)])):
        for is_recomputed, start in ((False, KEPT), (True, REMADE)):
            assert taken(kind, 1, is_recomputed) == [Channel(start, 1), Channel(GRADS, 2)]
        assert given(kind, 1) == [Channel(GRADS, 1), *left]
    assert (taken("W", 1, is_recomputed=True), given("W", 1)) == ([Channel(PENDING, 1)], [])


def stages():
    two = ("CPU:0", "CPU:1")
    return [
        Stage("a", None, [], [tf.constant(1), tf.constant(2)], two),
        Stage("b", None, [], [], two),
    ]


def test_before_the_first_action_there_are_carries_and_nothing_else():
    two = stages()
    state = State.before(two, [0, 1])
    assert state.carries == [list(two[0].carry), []]
    assert state.carries[0] is not two[0].carry
    assert state.carry_grads == [[None, None], []]
    assert state.accumulators == [None, None]
    # Two homes of two devices each.
    assert state.tokens == [[[], []]] * 2
    assert state.tokens[0] is not state.tokens[1]
    assert {d: [len(n) for n in notes] for d, notes in state.notes.items()} == {
        "forward": [2, 2],
        "backward": [2, 2],
    }


def test_a_note_of_nothing_is_no_place():
    notes = empty_notes(stages())
    assert [[int(note) for note in of_stage] for of_stage in notes] == [[-1, -1], [-1, -1]]
    assert notes[0][0].dtype == tf.int64


def test_operations_of_another_graph_are_waited_for_by_none():
    with tf.Graph().as_default():
        before = tf.no_op()
    with tf.Graph().as_default():
        state = State.before(stages(), [0, 1])
        here = tf.no_op()
        state.tokens = [[[before, here], [before]], [[], [here]]]
        state.forget_tokens_of_other_graphs()
        assert state.tokens == [[[here], []], [[], [here]]]
