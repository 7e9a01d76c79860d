"""What a pipeline would hold, asked of the layer before anything runs."""

import pytest
import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PipelineError
from tests.layers.blocks import WIDTH, Block, blocks
from tests.layers.harness import executing
from tests.layers.stacks import stack_of

MICROBATCHES, ROWS, LENGTH, FLOAT = 4, 2, 3, 4
# A tensor between two stages, of one microbatch; and the weights of a block.
BETWEEN = ROWS * LENGTH * WIDTH * FLOAT
X = tf.TensorSpec([MICROBATCHES * ROWS, LENGTH, WIDTH])


class Head(Block):
    def FProp(self, theta, x):
        y = super().FProp(theta, x)
        return tf.reduce_sum(y), tf.cast(tf.size(y), tf.float32)


def layer(schedule="1f1b", **kwargs):
    sub = [*blocks(3), Head.Params().Set(name="head")]
    kwargs |= {"num_micro_batches": MICROBATCHES, "loss_inside": True, "schedule": schedule}
    return stack_of(sub, [0, 2, 4], **kwargs).Instantiate()


@pytest.mark.parametrize(
    ("eager", "schedule", "in_flight"), [(True, "1f1b", [2, 1]), (False, "gpipe", [4, 4])]
)
def test_full_remat_keeps_the_inputs_of_the_stages(eager, schedule, in_flight):
    with executing(eager, 2):
        stack = layer(schedule)
        found = stack.PredictMemory(X)
        assert [device.kept for device in found] == [BETWEEN * number for number in in_flight]
        weights = [num_bytes(stack.vars[name].Flatten()) for name in ("s0", "s1")]
        assert [device.weights for device in found] == weights
        assert [device.gradients for device in found] == weights


def test_nothing_is_made_in_the_callers_graph_and_bad_shapes_are_errors():
    with executing(False, 2):
        stack = layer()
        stack.theta  # noqa: B018  (may cast)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        found = {t.what: (t.times, t.bytes) for t in stack.PredictTransfers(X)}
        assert len(tf.compat.v1.get_default_graph().get_operations()) == before
        # Each microbatch goes on once and its gradient comes back.
        assert found == dict.fromkeys(("activations", "gradients"), (4, 4 * BETWEEN))
        with pytest.raises(PipelineError, match=r"9 .*4"):
            stack.PredictMemory(tf.TensorSpec([9, LENGTH, WIDTH]))
