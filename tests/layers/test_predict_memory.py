"""What a pipeline would hold, asked of the layer before anything runs."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import cluster

MICROBATCHES, ROWS, LENGTH, FLOAT = 4, 2, 3, 4
# A tensor between two stages, of one microbatch; and the weights of a block.
BETWEEN = ROWS * LENGTH * WIDTH * FLOAT
X = tf.TensorSpec([MICROBATCHES * ROWS, LENGTH, WIDTH])


class Head(Block):
    def FProp(self, theta, x):
        y = super().FProp(theta, x)
        return tf.reduce_sum(y), tf.cast(tf.size(y), tf.float32)


@contextlib.contextmanager
def eager_or_graph(eager):
    py_utils.SetEagerMode(eager, test_mode=True)
    with contextlib.ExitStack() as stack:
        if not eager:
            stack.enter_context(tf.Graph().as_default())
        stack.enter_context(cluster(2))
        py_utils.GetOrCreateGlobalStepVar()
        yield


def layer(schedule="1f1b", remat="full", **kwargs):
    sub = [*blocks(3), Head.Params().Set(name="head")]
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=sub[2 * i : 2 * i + 2])
        for i in range(2)
    ]
    params = PipeliningLayer.Params().Set(
        name="stack",
        cell_tpl=cells,
        num_micro_batches=MICROBATCHES,
        schedule=schedule,
        loss_inside=True,
        remat=remat,
        **kwargs,
    )
    return params.Instantiate()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", [2, 1]), ("gpipe", [4, 4])])
def test_full_remat_keeps_the_inputs_of_the_stages(eager, schedule, in_flight):
    with eager_or_graph(eager):
        stack = layer(schedule)
        found = stack.PredictMemory(X)
        assert [device.kept for device in found] == [BETWEEN * number for number in in_flight]
        weights = [
            sum(np.prod(v.shape) * FLOAT for v in stack.vars[name].Flatten())
            for name in ("s0", "s1")
        ]
        assert [device.weights for device in found] == weights
        assert [device.gradients for device in found] == weights


def test_policies_and_dtypes_are_told_apart():
    with eager_or_graph(True):
        kept = {
            remat: [device.kept for device in layer(remat=remat).PredictMemory(X)]
            for remat in ("full", "none", "except_last")
        }
        half = [device.kept for device in layer(fprop_dtype=tf.bfloat16).PredictMemory(X)]
    assert kept["none"][0] > kept["full"][0]
    # The last stage's backward passes follow its forward passes at once.
    assert kept["except_last"] == [kept["except_last"][0], kept["none"][1]]
    assert [2 * number for number in half] == kept["full"]


def test_nothing_is_made_in_the_callers_graph_and_bad_shapes_are_errors():
    with eager_or_graph(False):
        stack = layer()
        stack.theta  # noqa: B018  (may cast)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        stack.PredictMemory(X)
        assert len(tf.compat.v1.get_default_graph().get_operations()) == before
        with pytest.raises(PipelineError, match=r"9 .*4"):
            stack.PredictMemory(tf.TensorSpec([9, LENGTH, WIDTH]))


def test_what_goes_between_devices_is_known_beforehand():
    with eager_or_graph(True):
        stack = layer()
        found = {t.what: t for t in stack.PredictTransfers(X)}
        # Each microbatch goes on once and its gradient comes back.
        assert found.keys() == {"activations", "gradients"}
        for transfer in found.values():
            assert (transfer.times, transfer.bytes) == (4, 4 * BETWEEN)
