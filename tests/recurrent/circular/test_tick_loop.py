"""The loop over ticks follows its timetable, and returns what one device would compute."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent.circular.tick_loop import RingTicks, TickLoop
from pipemesh.schedule import decode, looped_bfs
from pipemesh.schedule.simulate import lockstep


class Recorder:
    """Multiplies by 2, and notes what each core does at each tick."""

    def __init__(self):
        self.ticks = []

    def note(self, kind, now):
        self.ticks.append(
            [
                f"{int(stage)}{kind}{int(m)}" if busy else None
                for stage, m, busy in zip(now.stage, now.microbatch, now.busy, strict=True)
            ]
        )

    def forward(self, now, x):
        self.note("F", now)
        return (tuple(2.0 * part for part in x[0]),)

    def zero_sums(self):
        return ()

    def backward(self, now, x, grad_y, sums):
        self.note("B", now)
        return (tuple(2.0 * part for part in grad_y[0]),), ()


@pytest.mark.parametrize("sizes", [(1, 3, 2), (2, 3, 1), (3, 2, 2), (4, 1, 2), (2, 4, 3)])
def test_the_loop_follows_the_schedule(sizes):
    num_cores, num_microbatches, rounds = sizes
    schedule = looped_bfs(*sizes)
    mesh = Mesh.from_text(f"layers:{num_cores}")
    lowering = PlacementLowering(mesh, LayoutRules(), ["CPU:0"] * num_cores)
    stage = Recorder()
    loop = TickLoop(lowering, RingTicks(num_cores, num_microbatches, rounds))
    x = tf.range(1.0, num_microbatches + 1)[:, None]
    (outputs,), saved = loop.forward(stage, ((x,) * num_cores,))
    np.testing.assert_array_equal(outputs[0], x * 2.0**schedule.num_stages)
    (grads,), _ = loop.backward(stage, ((x,) * num_cores,), saved)
    np.testing.assert_array_equal(grads[0], x * 2.0**schedule.num_stages)
    table = lockstep(schedule)
    did = [tuple(core) for core in zip(*stage.ticks, strict=True)]
    assert did == [tuple(action and str(action) for action in row) for row in table]


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_ticks_of_a_ring_are_those_of_the_schedule(cores):
    counts = itertools.product([1, 2, 3, 5], [(1, 1), (1, 4), (2, 1), (2, 3)])
    for groups, (rounds, turns) in counts:
        ticks = RingTicks(cores, groups, rounds, turns)
        table = lockstep(decode(cores, groups, rounds * turns))
        assert ticks.num_ticks == len(table[0])
        for core, row in enumerate(table):
            now = ticks.at(tf.range(ticks.num_ticks), core)
            stages = (now.turn * rounds + now.round) * cores + core
            assert [
                (int(stage), int(group)) if busy else None
                for stage, group, busy in zip(stages, now.microbatch, now.busy, strict=True)
            ] == [action and (action.stage, action.microbatch) for action in row]


@pytest.mark.parametrize(
    ("cores", "groups", "rounds"),
    [(1, 4, 2), (3, 2, 2), (3, 4, 1)],
)
def test_a_ring_returns_what_one_device_computes(cores, groups, rounds):
    """Stages that do not commute, a state of their own, and NaN wherever nobody is at work."""
    turns = 3
    mesh = Mesh.from_text(f"layers:{cores}")
    lowering = PlacementLowering(mesh, LayoutRules(), ["CPU:0"] * cores)

    def enter(first, state):
        enters = first.busy & tf.equal(first.round, 0)
        x = tf.where(enters, state["now"][first.microbatch], float("nan"))
        return ((x,) * cores,), state

    def stage(now, x, state):
        counts, y = [], []
        for core in range(cores):
            round_, busy = now.round[core], now.busy[core]
            value = x[0][core] * 1.5 + tf.cast(now.stage[core], tf.float32)
            y.append(tf.where(busy, value, float("nan")))
            at, added = [[round_ * groups + now.microbatch[core]]], [tf.cast(busy, tf.int32)]
            counts.append(tf.tensor_scatter_nd_add(state["counts"][core], at, added))
        return (tuple(y),), {**state, "counts": tuple(counts)}

    def leave(last, y, state):
        now, group = state["now"], last.microbatch
        leaves = last.busy & tf.equal(last.round, rounds - 1)
        new = tf.where(leaves, y[0][-1], now[group])
        return {**state, "now": tf.tensor_scatter_nd_update(now, [[group]], [new])}

    @tf.function
    def run(turns):
        state = {
            "now": tf.range(1.0, groups + 1.0),
            "counts": (tf.zeros([rounds * groups], tf.int32),) * cores,
        }
        loop = TickLoop(lowering, RingTicks(cores, groups, rounds, turns))
        slots = () if rounds == 1 else ((tf.zeros([groups]),) * cores,)
        return loop.run(stage, state, ((tf.zeros([]),) * cores,), slots, enter, leave)[1]

    found = run(tf.constant(turns))
    for group, now in enumerate(found["now"].numpy()):
        wanted = group + 1.0
        for number in [*range(cores * rounds)] * turns:
            wanted = wanted * 1.5 + number
        assert now == pytest.approx(wanted)
    for count in found["counts"]:
        assert count.numpy().tolist() == [turns] * (rounds * groups)
