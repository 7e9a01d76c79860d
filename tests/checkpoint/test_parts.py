"""Parts of a checkpoint that several processes write, joined by the first one."""

import errno
import os
import time

import pytest
import tensorflow as tf

from pipemesh.backend.processes import Processes
from pipemesh.backend.saved_state import Slice, SlicedVariable
from pipemesh.checkpoint import contents, parts
from pipemesh.checkpoint.entries import Snapshot, entries_of
from pipemesh.errors import SaveError

BOTH = Processes(("a:1", "b:1"), 0)


def snapshots():
    """Returns the snapshots of two processes: a tensor and half of another one each."""
    halves = [tf.Variable(tf.fill([2, 3], float(i))) for i in range(2)]
    rows = SlicedVariable([(half, Slice((4, 3), (2 * i, 0))) for i, half in enumerate(halves)])
    whole = Snapshot.of(entries_of({"w": tf.Variable([1.0]), "rows": rows, "v": tf.Variable(2)}))
    by_name = list(zip(whole.names, whole.specs, whole.hosts, whole.tensors, strict=True))
    return [
        Snapshot(*map(list, zip(*some, strict=True)), elements=whole.elements)
        for some in (by_name[:2], by_name[2:])
    ]


def join(folder, mark):
    parts.join_parts(folder, os.path.join(folder, "ckpt-3"), BOTH, mark)
    return contents(os.path.join(folder, "ckpt-3"))[0]


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def test_a_part_of_an_earlier_attempt_is_not_joined(folder, monkeypatch):
    """A process that was stopped, and goes on after the others have begun again, writes late."""
    first, second = snapshots()
    monkeypatch.setattr(parts, "_SECONDS", 0.2)
    parts.write_part(folder, second, 1, "earlier")
    parts.write_part(folder, first, 0, "now")
    with pytest.raises(SaveError, match=r"process 1 \(b:1\) has written nothing"):
        join(folder, "now")
    parts.write_part(folder, second, 1, "now")
    assert join(folder, "now") == {"w": [1], "rows": [4, 3], "v": []}


def test_missing_tensors_and_slices_are_errors(folder):
    first, second = snapshots()
    for number, (names, told) in enumerate(((["rows"], "'v'"), (["v"], "'rows'"))):
        kept = [second.names.index(name) for name in names]
        pruned = [[values[i] for i in kept] for values in list(vars(second).values())[:4]]
        mark = str(number)
        parts.write_part(folder, first, 0, mark)
        parts.write_part(folder, Snapshot(*pruned, elements=second.elements), 1, mark)
        missing = rf"1 of 3 tensors were not completely written .* as {told}"
        with pytest.raises(SaveError, match=missing):
            join(folder, mark)


@pytest.mark.parametrize("room", ["for a reason", "for a name"])
def test_a_full_disk_reaches_the_first_process_at_once(folder, monkeypatch, room):
    """The reason found no room, and every save waited ten minutes for nothing."""
    first, second = snapshots()
    parts.write_part(folder, first, 0, "now")
    real = parts.write_whole

    def full(host, prefix, *_):
        with open(f"{prefix}.data-00000-of-00001.tempstate7", "wb") as file:
            file.write(b"in part")
        raise tf.errors.ResourceExhaustedError(None, None, "b; No space left on device")

    def write_whole(path, content):
        if room == "for a name" or any("tempstate" in name for name in os.listdir(folder)):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(parts, "write_tensors", full)
    monkeypatch.setattr(parts, "write_whole", write_whole)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        parts.write_part(folder, second, 1, "now")
    begin = time.monotonic()
    why = "b; No space left on device" if room == "for a reason" else ".* disk is probably full"
    with pytest.raises(SaveError, match=rf"^process 1 \(b:1\): {why}$"):
        join(folder, "now")
    assert time.monotonic() - begin < 5
