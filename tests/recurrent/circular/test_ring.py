"""Groups go round as the table of decoding says, and come back as if one device ran all stages."""

import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent.circular.ring import Ring
from pipemesh.schedule import decode
from pipemesh.schedule.simulate import lockstep


def ring(cores, groups, rounds):
    mesh = Mesh.from_text(f"layers:{cores}")
    return Ring(PlacementLowering(mesh, LayoutRules(), ["CPU:0"] * cores), groups, rounds)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize(("rounds", "turns"), [(1, 1), (1, 4), (2, 1), (2, 3)])
def test_ticks_are_those_of_the_table(cores, groups, rounds, turns):
    made = ring(cores, groups, rounds)
    table = lockstep(decode(cores, groups, rounds * turns))
    assert made.num_ticks(turns) == len(table[0])
    for core, row in enumerate(table):
        for tick, action in enumerate(row):
            beat = made.at(tf.constant(tick), core, turns)
            assert bool(beat.busy) == (action is not None)
            if action is not None:
                passed = int(beat.turn) * rounds + int(beat.round)
                assert (action.stage, action.microbatch) == (
                    passed * cores + core,
                    int(beat.group),
                )


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2])
def test_what_comes_out_is_what_one_device_makes(cores, groups, rounds):
    """Stages that do not commute, a state of their own, and NaN wherever nobody is at work."""
    turns = 3
    made = ring(cores, groups, rounds)
    stages = cores * rounds
    lowering = made._lowering
    core_of = lowering.coordinate("layers") if cores > 1 else (tf.constant(0),)

    def enter(beat, enters, state):
        x = tf.where(enters, state["now"][beat.group], float("nan"))
        return ((x,) * cores,), state

    def stage(beat, x, state):
        counts, y = [], []
        parts = zip(x[0], core_of, *beat, state["counts"], strict=True)
        for value, core, _, round_, group, busy, count in parts:
            number = tf.cast(round_ * cores + core, tf.float32)
            y.append(tf.where(busy, value * 1.5 + number, float("nan")))
            at = [[round_ * groups + group]]
            counts.append(tf.tensor_scatter_nd_add(count, at, [tf.cast(busy, tf.int32)]))
        return (tuple(y),), {**state, "counts": tuple(counts)}

    def leave(beat, leaves, y, state):
        now = state["now"]
        new = tf.where(leaves, y[0][-1], now[beat.group])
        return {**state, "now": tf.tensor_scatter_nd_update(now, [[beat.group]], [new])}

    @tf.function
    def run(turns):
        state = {
            "now": tf.range(1.0, groups + 1.0),
            "counts": (tf.zeros([rounds * groups], tf.int32),) * cores,
        }
        return made.run(turns, enter, stage, leave, state, ((tf.zeros([]),) * cores,))

    found = run(tf.constant(turns))
    for group, now in enumerate(found["now"].numpy()):
        wanted = group + 1.0
        for number in [*range(stages)] * turns:
            wanted = wanted * 1.5 + number
        assert now == pytest.approx(wanted)
    for count in found["counts"]:
        assert count.numpy().tolist() == [turns] * (rounds * groups)
