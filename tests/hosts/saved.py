"""A program that saves and restores what lies on workers, or in one process without any.

    python -m tests.hosts.saved WORKERS FOLDER TASK

WORKERS are addresses with commas between, or none. Prints a line of JSON.
"""

import hashlib
import itertools
import json
import os
import sys
import threading
import time

import tensorflow as tf

from pipemesh.backend.cluster import task_of, worker_devices
from pipemesh.backend.saved_state import Slice, SlicedVariable
from pipemesh.checkpoint import Checkpoints, newest_whole, reader, slices
from pipemesh.checkpoint import checkpoints as module
from pipemesh.errors import SaveError
from pipemesh.hosts import Cluster
from pipemesh.hosts.client import connect
from tests.hosts.trained import bytes_of_sockets

ROWS, COLUMNS = 1024, 512
# Of the four tensors that lie on devices.
BYTES = 4 * ROWS * COLUMNS * 4


def tracked(devices, seed):
    """Tensors to save: whole and in slices, by rows and by columns, on several devices and here."""

    def variable(device, number, rows=ROWS, columns=COLUMNS):
        with tf.device(device):
            value = tf.random.stateless_uniform([ROWS, COLUMNS], [seed, number])
            return tf.Variable(value[:rows, :columns] if seed else tf.zeros([rows, columns]))

    def sliced(number, dim):
        n, parts = len(devices), []
        sizes = [ROWS, COLUMNS]
        sizes[dim] //= n
        for i, device in enumerate(devices):
            begin = [0, 0]
            begin[dim] = i * sizes[dim]
            part = variable(device, 10 * number + i, *sizes)
            parts.append((part, Slice((ROWS, COLUMNS), tuple(begin))))
        return SlicedVariable(parts)

    iterator = iter(tf.data.Dataset.range(100))
    for _ in range(seed):
        next(iterator)
    return {
        "step": tf.Variable(seed, dtype=tf.int64),
        "first": variable(devices[0], 1),
        "last": variable(devices[-1], 2),
        "rows": sliced(3, 0),
        "columns": sliced(4, 1),
        "place": iterator,
    }


def digests(values):
    """Digests of the whole tensors by name, however they are cut."""
    found = {}
    for name, value in values.items():
        if name == "place":
            found[name] = int(next(value))
            continue
        parts = [v.numpy() for v, _ in getattr(value, "parts", [(value, None)])]
        axis = 1 if name == "columns" else 0
        whole = parts[0] if len(parts) == 1 else tf.concat(parts, axis).numpy()
        found[name] = hashlib.sha256(whole.tobytes()).hexdigest()
    return found


def save(folder, devices):
    """Saves twice, from workers and by way of this process; restores; counts bytes."""
    values = tracked(devices, 7)
    saver = Checkpoints(folder, values)
    carried = [bytes_of_sockets()]
    saver.save(1, {})
    carried.append(bytes_of_sockets())
    first = saver.save(2, {})
    carried.append(bytes_of_sockets())
    module.writers = lambda *_: []
    Checkpoints(folder, values).save(3, {})
    carried.append(bytes_of_sockets())
    fresh = tracked(devices, 0)
    before = bytes_of_sockets()
    assert reader.restore(first, fresh) == []
    restored = bytes_of_sockets() - before
    return {
        "carried": [b - a for a, b in itertools.pairwise(carried)],
        "restored": restored,
        "values": digests(fresh),
    }


def restore(folder, devices):
    """Restores the newest."""
    fresh = tracked(devices, 0)
    reader.restore(newest_whole(folder)[0], fresh)
    return {"values": digests(fresh)}


def stepping(values, *names):
    """A training step that adds 1 to some values, each on its device."""

    @tf.function(autograph=False)
    def step():
        for part in [v for name in names for v, _ in _parts(values[name])]:
            with tf.device(part.device):
                part.assign_add(tf.ones_like(part))
        return tf.constant(0)

    return step


def beside(folder, devices):
    """Trains on while it saves, and while a worker cannot write; then saves again."""
    values = tracked(devices, 7)
    step = stepping(values, "first", "rows")

    def now(values):
        return digests({name: value for name, value in values.items() if name != "place"})

    step()
    saver = Checkpoints(folder, values)
    saver.save(1, {})
    kept = moved = True
    # Several times: a step that overtakes the reading of a worker does so now and then.
    for number in range(2, 5):
        at = now(values)
        path = saver.begin(number, {})
        saver.confirm()
        steps = 0
        while saver.is_writing or steps < 3:
            step()
            steps += 1
        saver.wait()
        fresh = tracked(devices, 0)
        reader.restore(path, fresh)
        kept &= now(fresh) == at
        moved &= now(values) != at
    absolute = slices.absolute
    slices.absolute = lambda prefix, host: (
        "/proc/none/ckpt" if task_of(host) == 1 else absolute(prefix, host)
    )
    error = None
    for _ in range(3):
        saver.begin(5, {})
        saver.confirm()
        while saver.is_writing:
            step()
        try:
            saver.wait()
        except SaveError as found:
            error = str(found)
        step()
    slices.absolute = absolute
    newest = saver.save(6, {})
    return {"kept": kept, "moved": moved, "error": error, "newest": newest}


def endless(folder, devices):
    """Saves until it is killed; what it goes on from, it says first."""
    found = newest_whole(folder)
    values = tracked(devices, 0)
    saver = Checkpoints(folder, values)
    step = 0
    if found:
        step = found[1].step
        reader.restore(found[0], values)
    parts = [v for n in ("first", "last", "rows", "columns") for v, _ in _parts(values[n])]
    firsts = sorted({float(v[0, 0]) for v in parts})
    print(json.dumps({"step": step, "values": firsts}), flush=True)
    threading.Timer(100, lambda: os._exit(1)).start()
    while True:
        step += 1
        for v in parts:
            v.assign(tf.fill(v.shape, float(step)))
        saver.begin(step, {})
        saver.confirm()
        print(step, flush=True)
        time.sleep(0)


def _parts(value):
    return getattr(value, "parts", [(value, None)])


TASKS = {each.__name__: each for each in (save, restore, beside, endless)}


def main(workers, folder, task):
    if workers:
        connect(Cluster.from_text(workers))
        devices = [of_worker[0] for of_worker in worker_devices("CPU")]
    else:
        devices = ["CPU:0"]
    found = TASKS[task](folder, devices)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
