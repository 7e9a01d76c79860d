"""One action at a time, on the device of its stage, in the order of its home."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Home, Options, Stage, predict_memory, predict_transfers
from pipemesh.recurrent.table.machine import State
from pipemesh.schedule import ScheduleSpec
from tests.recurrent.sends import sends, trained

HOMES = [Home(("CPU:0", "CPU:1")), Home(("CPU:2", "CPU:3"))]
INPUTS = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
W = [np.random.default_rng(i).normal(size=[4, 4]).astype(np.float32) for i in (1, 2)]
MICROBATCHES = 4


def test_operations_of_another_graph_are_waited_for_by_none():
    with tf.Graph().as_default():
        before = tf.no_op()
    with tf.Graph().as_default():
        state = State.before([Stage("a", None, [], [], HOMES[0])] * 2, [0, 1])
        here = tf.no_op()
        state.tokens = [[[before, here], [before]], [[], [here]]]
        state.forget_tokens_of_other_graphs()
        assert state.tokens == [[[here], []], [[], [here]]]


def product(theta, carry, inputs, microbatch, step):
    return [tf.tanh(tf.matmul(inputs[0], tf.concat(theta, 0)))], []


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(product(theta, carry, inputs, microbatch, step)[0][0] ** 2)], []


def stages_of(slices):
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
            zip((product, squares), slices, HOMES, strict=True)
        )
    ]


def predicted(predict, schedule, **options):
    with tf.Graph().as_default():
        stages = stages_of([np.split(whole, 2) for whole in W])
        return predict(stages, [tf.constant(INPUTS)], schedule, options=Options(**options))


# Their results: `tests/layers/pipeline/test_zero3.py`.
@pytest.mark.parametrize(("name", "remat"), [("1f1b", "full"), ("zb_h1", "none")])
def test_a_slice_is_sent_per_action_its_gradient_per_step(name, remat):
    schedule = ScheduleSpec.from_text(name).build(2, MICROBATCHES)
    stages = stages_of([np.split(whole, 2) for whole in W])
    run = trained(stages, [INPUTS], schedule, remat=remat)
    slices = collections.Counter((f"CPU:{a}", f"CPU:{b}") for *_, a, b in sends(run))
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
    memory = predicted(predict_memory, schedule, remat=remat)
    assert [device.weights for device in memory] == [W[0].nbytes // 2] * 4
    # Each replica sums up what its rows give, for all of the weight.
    assert [device.gradients for device in memory] == [W[0].nbytes] * 4
    sums = [(t.times, t.bytes) for t in found if t.what == "weight gradients"]
    assert sums == [(1, W[0].nbytes // 2)] * 4
