"""A PipeliningLayer with the loss in its last stage trains as the plain stack does."""

import functools
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent import Selective
from pipemesh.schedule import Costs, list_schedule
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import run_tf1, run_tf2
from tests.layers.pipeline.stacks import plain, stack_of

RNG = np.random.default_rng(1)
X = RNG.normal(size=[8, 3, WIDTH]).astype(np.float32)


class Head(Block):
    """Summed loss and weight, a metric of every example and one of the microbatch."""

    def FProp(self, theta, x, labels):
        error = tf.reduce_sum(tf.square(super().FProp(theta, x) - labels), axis=[1, 2])
        weight = tf.cast(tf.size(error), tf.float32)
        return tf.reduce_sum(error), weight, error, tf.reduce_max(error)


def sub():
    return [*blocks(3), Head.Params().Set(name="head")]


def pipelined(num_stages, num_micro_batches, **kwargs):
    bounds = range(0, 5, 4 // num_stages)
    kwargs |= {"num_micro_batches": num_micro_batches, "loss_inside": True}
    return stack_of(sub(), bounds, **kwargs)


def mean(outputs):
    return outputs[0] / outputs[1]


@functools.cache
def expected(run):
    return run(plain(sub()), [X, X], steps=3, loss=mean)


def assert_equal(result, expected, num_micro_batches):
    metrics = result.outputs.pop()
    assert metrics.shape == (num_micro_batches,)
    whole = expected.outputs[:3]
    for a, b in zip(result.outputs, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert metrics.max() == pytest.approx(expected.outputs[3], rel=1e-4)
    result.outputs, rest = [], expected.outputs
    expected.outputs = []
    result.assert_close(expected, rtol=1e-4, atol=1e-5)
    expected.outputs = rest


SCHEDULES = [
    ("1f1b", 2, 2),
    ("gpipe", 4, 4),
    ("interleaved:2", 4, 2),
    ("zb_h1", 4, 4),
    ("zb_v", 4, 2),
    (list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0)), 4, 2),
]


# The executor's tests run every table in both execution modes: here the modes take turns.
@pytest.mark.parametrize(
    ("run", "schedule", "num_stages", "num_devices"),
    [
        pytest.param(run, *case, marks=() if (i + j) % 2 else pytest.mark.exhaustive)
        for i, run in enumerate((run_tf1, run_tf2))
        for j, case in enumerate(SCHEDULES)
    ],
    indirect=["run"],
)
def test_every_schedule_trains_as_the_plain_stack(run, schedule, num_stages, num_devices):
    params = pipelined(num_stages, 4, schedule=schedule, remat="none")
    result = run(params, [X, X], steps=3, num_devices=num_devices, loss=mean)
    assert_equal(result, expected(run), 4)
    assert result.accumulators == [8.0] * 4


@pytest.mark.slow
def test_selective_remat_picks_layers_by_name(run):
    remat = Selective(lambda name: name in ("block1", "block2", "head"))
    params = pipelined(2, 4, schedule="1f1b", remat=remat)
    assert_equal(run(params, [X, X], steps=3, num_devices=2, loss=mean), expected(run), 4)


@pytest.mark.slow
def test_a_schedule_as_a_loop(run):
    params = pipelined(2, 4, schedule="1f1b", loop=True)
    with mock.patch.object(tf, "while_loop", wraps=tf.while_loop) as loops:
        result = run(params, [X, X], steps=3, num_devices=2, loss=mean)
    assert loops.called
    assert_equal(result, expected(run), 4)


def test_evaluation_runs_through_the_same_devices_without_dropout(run):
    expected = run(plain(sub()), [X, X], do_eval=True, loss=mean)
    for num_stages, num_devices, schedule in ((2, 1, "1f1b"), (2, 2, "1f1b"), (4, 2, "zb_v")):
        params = pipelined(num_stages, 4, schedule=schedule)
        # Inference has no backward actions, so no gradient is asked for.
        result = run(params, [X, X], num_devices=num_devices, do_eval=True, loss=None)
        for a, b in zip(result.outputs[:3], expected.outputs[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"schedule": "1f2b"}, ScheduleError, "unknown schedule '1f2b'; did you mean '1f1b'"),
        ({"schedule": "file:missing.csv"}, ScheduleError, "cannot read missing.csv: No such file"),
        ({"loss_inside": False}, PipelineError, "returns a scalar"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit_are_errors_before_the_first_step(run, kwargs, error, message):
    with pytest.raises(error, match=message):
        run(pipelined(4, 4).Set(**kwargs), [X, X], num_devices=4, loss=mean)
