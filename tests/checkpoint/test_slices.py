"""Entries and snapshots."""

import pytest
import tensorflow as tf

from pipemesh.backend.saved_state import Slice, SlicedVariable
from pipemesh.checkpoint.slices import Snapshot, chunks, entries_of
from pipemesh.errors import CheckpointError


def test_a_snapshot_is_independent_of_later_updates():
    w, slot = tf.Variable(tf.range(8.0)), tf.Variable(tf.ones([8]))
    table = tf.Variable(tf.zeros([4, 2]))
    iterator = iter(tf.data.Dataset.range(9))
    next(iterator)
    tracked = {"w": w, "slot": slot, "table": table, "it": iterator}
    snapshot = Snapshot.of(entries_of(tracked))

    @tf.function
    def step():
        tf.raw_ops.ResourceApplyAdagradV2(
            var=w.handle, accum=slot.handle, lr=1.0, epsilon=1e-7, grad=tf.ones([8])
        )
        w.assign_add(tf.ones([8]))
        table.scatter_update(tf.IndexedSlices(tf.ones([1, 2]), [2]))

    step()
    next(iterator)
    values = dict(zip(snapshot.names, snapshot.tensors, strict=True))
    assert values["w"].numpy().tolist() == list(range(8))
    assert values["slot"].numpy().tolist() == [1.0] * 8
    assert not values["table"].numpy().any()
    assert w.numpy()[0] != 0 and slot.numpy()[0] == 2 and table.numpy()[2, 0] == 1


def test_slices_are_one_name():
    parts = [tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([2, 1]))]
    sliced = SlicedVariable([(parts[0], Slice((2, 4), (0, 0))), (parts[1], Slice((2, 4), (0, 3)))])
    (entry,) = entries_of({"w": sliced})
    assert (entry.name, entry.shape, entry.dtype) == ("w", (2, 4), tf.float32)
    assert Snapshot.of([entry]).specs == ["2 4 0,2:0,3", "2 4 0,2:3,1"]
    with pytest.raises(CheckpointError, match="'w' is a list; a checkpoint has variables"):
        entries_of({"w": [1.0]})


def test_parts_come_in_groups_of_bytes():
    tracked = {str(n): tf.Variable(tf.zeros([n])) for n in (4, 1, 1, 9, 2)}
    tracked["1b"] = tf.Variable(tf.zeros([1]))
    parts = [(entry, part) for entry in entries_of(tracked) for part in entry.parts]
    groups = list(chunks(parts, most=24))
    assert [[entry.name for entry, _ in group] for group in groups] == [
        ["4", "1"],
        ["9"],
        ["2", "1b"],
    ]
