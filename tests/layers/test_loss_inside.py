"""A PipeliningLayer with the loss in its last stage trains as the plain stack does."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Selective
from pipemesh.schedule import Costs, list_schedule
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import run_tf1, run_tf2
from tests.layers.stacks import plain_results, stack_of

RNG = np.random.default_rng(1)
X = RNG.normal(size=[8, 3, WIDTH]).astype(np.float32)


class Head(Block):
    """Summed loss and weight, a metric of every example and one of the microbatch."""

    def FProp(self, theta, x, labels):
        error = tf.reduce_sum(tf.square(super().FProp(theta, x) - labels), axis=[1, 2])
        weight = tf.cast(tf.size(error), tf.float32)
        return tf.reduce_sum(error), weight, error, tf.reduce_max(error)


def pipelined(num_stages, **kwargs):
    layers = [*blocks(3), Head.Params().Set(name="head")]
    kwargs = {"num_micro_batches": 4, "loss_inside": True, **kwargs}
    return stack_of(layers, range(0, 5, 4 // num_stages), **kwargs)


def mean(outputs):
    return outputs[0] / outputs[1]


def assert_trains_as_plain(run, params, num_devices):
    found = run(params, [X, X], steps=3, num_devices=num_devices, loss=mean)
    wanted = plain_results(run, params, [X, X], steps=3, loss=mean)
    metrics = found.outputs.pop()
    assert metrics.shape == (4,)
    assert metrics.max() == pytest.approx(wanted.outputs[3], rel=1e-4)
    wanted = dataclasses.replace(wanted, outputs=wanted.outputs[:3])
    found.assert_close(wanted, rtol=1e-4, atol=1e-5)
    assert found.accumulators == [8.0] * 4


SOME = {"remat": Selective(lambda name: name in ("block1", "block2", "head"))}
NONE = {"remat": "none"}


# The executor's tests run every table in both execution modes: here the modes take turns.
@pytest.mark.parametrize(
    ("run", "schedule", "num_stages", "num_devices", "options"),
    [
        (run_tf2, "1f1b", 2, 2, SOME),
        (run_tf2, "interleaved:2", 4, 2, NONE),
        (run_tf1, list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0)), 4, 2, NONE),
    ],
)
def test_every_schedule_trains_as_the_plain_stack(run, schedule, num_stages, num_devices, options):
    assert_trains_as_plain(run, pipelined(num_stages, schedule=schedule, **options), num_devices)


@pytest.mark.slow
def test_a_schedule_as_a_loop(run):
    with mock.patch.object(tf, "while_loop", wraps=tf.while_loop) as loops:
        assert_trains_as_plain(run, pipelined(2, schedule="1f1b", loop=True), 2)
    assert loops.called


@pytest.mark.parametrize(
    ("num_stages", "num_devices", "schedule"), [(2, 1, "1f1b"), (4, 2, "zb_v")]
)
def test_evaluation_runs_through_the_same_devices(run, num_stages, num_devices, schedule):
    params = pipelined(num_stages, schedule=schedule)
    # Inference has no backward actions, so no gradient is asked for.
    options = {"do_eval": True, "loss": None}
    found = run(params, [X, X], num_devices=num_devices, **options).outputs[:3]
    for a, b in zip(found, plain_results(run, params, [X, X], **options).outputs, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
