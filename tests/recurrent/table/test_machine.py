"""One action at a time, on the device of its stage, in the order of its home."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import (
    Home,
    Options,
    Stage,
    pipeline_loss,
    predict_memory,
    predict_transfers,
    record_placement,
)
from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.machine import (
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
from pipemesh.schedule import ScheduleSpec
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import DY, ROWS, WEIGHTS, WIDTH, X, assert_close, small_machine


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


HOMES = [Home(("CPU:0", "CPU:1")), Home(("CPU:2", "CPU:3"))]
INPUTS = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
W = [np.random.default_rng(i).normal(size=[4, 4]).astype(np.float32) for i in (1, 2)]
MICROBATCHES = 4


def product(theta, carry, inputs, microbatch, step):
    return [tf.tanh(tf.matmul(inputs[0], tf.concat(theta, 0)))], []


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(product(theta, carry, inputs, microbatch, step)[0][0] ** 2)], []


def stages_of(slices, homes):
    return [
        Stage(
            f"s{i}",
            forward,
            [tf.convert_to_tensor(t) for t in own],
            [],
            home,
            places=[0, 1],
            fetched=frozenset({0, 1}),
        )
        for i, (forward, own, home) in enumerate(
            zip((product, squares), slices, homes, strict=True)
        )
    ]


def homes_of(schedule):
    return [HOMES[device] for device in schedule.stage_devices]


def step(schedule, **options):
    """A function that does a step; it returns the loss and the gradients of the slices."""
    homes, slices = homes_of(schedule), []
    for home, whole in zip(homes, W, strict=True):
        slices.append([])
        for device, part in zip(home.devices, np.split(whole, 2), strict=True):
            with tf.device(device):
                slices[-1].append(tf.Variable(part))
    with tf.device(homes[-1].first):
        seen = tf.Variable(0.0)

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss, _, _ = pipeline_loss(
                stages_of(slices, homes),
                [tf.constant(INPUTS)],
                schedule,
                options=Options(**options),
            )
        each = [variable for own in slices for variable in own]
        for variable, grad in zip(each, tape.gradient(loss, each), strict=True):
            # What a function returns goes to the first device of all.
            variable.assign_sub(grad)
        seen.assign(loss)

    return run, seen, slices


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_loss_and_gradients_are_those_of_whole_weights(name, remat, loop):
    schedule = ScheduleSpec.from_text(name).build(2, MICROBATCHES)
    run, seen, slices = step(schedule, remat=remat, loop=loop)
    run()
    weights = [tf.constant(w) for w in W]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(
            tf.tanh(tf.matmul(tf.tanh(tf.matmul(INPUTS, weights[0])), weights[1])) ** 2
        )
    np.testing.assert_allclose(seen, loss, rtol=1e-5)
    for own, before, grad in zip(slices, W, tape.gradient(loss, weights), strict=True):
        found = np.concatenate([part.numpy() for part in own])
        np.testing.assert_allclose(before - found, grad, rtol=1e-5, atol=1e-5)


def predicted(predict, schedule, **options):
    with tf.Graph().as_default():
        slices = [np.split(whole, 2) for whole in W]
        stages = stages_of(slices, homes_of(schedule))
        return predict(stages, [tf.constant(INPUTS)], schedule, options=Options(**options))


@pytest.mark.parametrize("remat", ["full", "none"])
def test_each_device_holds_its_slice(remat):
    schedule = ScheduleSpec.from_text("1f1b").build(2, MICROBATCHES)
    found = predicted(predict_memory, schedule, remat=remat)
    assert [device.weights for device in found] == [W[0].nbytes // 2] * 4
    # Each replica sums up what its rows give, for all of the weight.
    assert [device.gradients for device in found] == [W[0].nbytes] * 4


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_slice_goes_out_once_an_action_and_its_gradient_comes_back_once_a_step(name, remat):
    schedule = ScheduleSpec.from_text(name).build(2, MICROBATCHES)
    run, *_ = step(schedule, remat=remat, loop=False, check_numerics="off")
    with record_placement() as graphs:
        run()
    slices = collections.Counter()
    for graph in graphs.partition_graphs:
        for node in graph.node:
            # What waits for an operation elsewhere gets a constant from there.
            if node.op == "_Send" and "/ctrl/" not in node.input[0]:
                ends = (node.attr[f"{end}_device"].s.decode()[-1] for end in ("send", "recv"))
                slices[tuple(f"CPU:{end}" for end in ends)] += 1
    found = predicted(predict_transfers, schedule, remat=remat)
    wanted = collections.Counter()
    for transfer in found:
        if transfer.what != "inputs":
            wanted[transfer.source, transfer.target] += transfer.times
    assert slices == wanted
    of_weights = {(t.source, t.target): t for t in found if t.what == "weights"}
    assert of_weights.keys() == {(f"CPU:{a}", f"CPU:{a ^ 1}") for a in range(4)}
    for (source, _), transfer in of_weights.items():
        # The first stage has no gradient of its inputs, which alone would need its weights,
        # but it computes its outputs again.
        in_backward = source in ("CPU:2", "CPU:3") or remat == "full"
        assert transfer.times == MICROBATCHES * (1 + in_backward)
        assert transfer.bytes == transfer.times * W[0].nbytes // 2
    sums = [(t.times, t.bytes) for t in found if t.what == "weight gradients"]
    assert sums == [(1, W[0].nbytes // 2)] * 4


FIRST = tf.TensorSpec([ROWS, WIDTH])


class Values:
    """What one microbatch's actions read and write."""

    def __init__(self, state):
        self.state = state
        self.found = {(OUTPUTS, -1): [tf.constant(X[:ROWS])]}

    def read(self, kind, stage):
        return self.found[kind, stage]

    def write(self, kind, stage, value):
        self.found[kind, stage] = value


def perform(actions):
    """Values after actions of the first microbatch, such as `0F`; the machine."""
    machine, state = small_machine()
    values = Values(state)
    values.found[GRADS, 2] = [tf.constant(DY[:ROWS])]
    for action in actions:
        stage, kind = int(action[0]), action[1]
        with machine.acting(f"action_{action}0", stage):
            machine.act(kind, stage, FULL, tf.constant(0, tf.int64), values)
    return machine, values


def test_specs_and_places_of_what_actions_hand_on():
    with tf.Graph().as_default():
        machine, _ = small_machine()
        assert machine.specs(OUTPUTS, 0) == machine.specs(GRADS, 1) == [FIRST]
        assert machine.specs(KEPT, 0, FULL) == [FIRST]
        assert len(machine.specs(KEPT, 0, NONE)) == 2
        for kind in (OUTPUTS, GRADS, KEPT):
            assert machine.places(kind, 0, FULL) == machine.input_places(0) == [0], kind


def test_functions_of_a_mode_are_made_once():
    with tf.Graph().as_default():
        machine, _ = small_machine()
        assert machine.passes(0, FULL) is machine.passes(0, FULL)
        assert machine.passes(0, FULL) is not machine.passes(0, NONE)


def test_without_a_gradient_at_the_end_there_is_none_anywhere():
    with tf.Graph().as_default():
        machine, _ = small_machine(is_forward_only=True)
        assert machine.specs(GRADS, 0) == [None]
        assert machine.traced[0].gradients.of_theta == [None]


@pytest.mark.parametrize("halves", [False, True])
def test_actions_write_what_later_ones_read(halves):
    backwards = ["1I", "0I", "1W", "0W"] if halves else ["1B", "0B"]
    with tf.Graph().as_default():
        machine, values = perform(["0F", "1F", *backwards])
        sums = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        (y,), (dx,) = values.found[OUTPUTS, 1], values.found[GRADS, 0]
        assert y.device == "/device:CPU:2"
        assert ((PENDING, 0) in values.found) == halves
        found = run([y, dx, *sums])
    x = tf.constant(X[:ROWS])
    weights = [*map(tf.constant, WEIGHTS)]
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        h = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]))
    assert_close(found, [h, *tape.gradient(h, [x, *weights], tf.constant(DY[:ROWS]))])


def test_an_action_waits_for_the_one_before_on_its_home_alone():
    with tf.Graph().as_default():
        _, values = perform(["0F"])
        first, second = values.state.tokens
        assert second == [[]]
        (token,) = first
        assert values.found[OUTPUTS, 0][0].op in token
        assert {op.device for op in token} == {"/device:CPU:1"}


def test_a_stage_that_has_not_gone_backward_starts_from_zeros():
    with tf.Graph().as_default():
        machine, state = small_machine()
        machine.begin(0, state)
        ((zeros,), nothing) = state.accumulators
        assert nothing is None and zeros.shape == [WIDTH, WIDTH]
        assert zeros.device == "/device:CPU:1" and not run(zeros).any()
        state.accumulators[0] = [tf.ones([WIDTH, WIDTH])]
        given = state.accumulators[0]
        machine.begin(0, state)
        assert state.accumulators[0] is given
