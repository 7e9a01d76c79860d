"""What a tally refuses; what it counts is held against graphs in tests/conformance."""

import pytest
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PartitionError
from pipemesh.layers import layer_costs
from pipemesh.layers.named import FeedForward, NamedLayer, Norm, Tally, lowering_scope
from pipemesh.layers.named.feed_forward import ACTIVATIONS, READ_BY_GRADIENT
from tests.layers.named.harness import make_lowering

PARAMS = FeedForward.Params().Set(name="ff", input_dim=8, hidden_dim=12)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 8], "the shape .* was given for the dims 'batch;length;embed'; give one of each"),
        ([None, 3, 8], "every size has to be known"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(sizes, message):
    with pytest.raises(PartitionError, match=message):
        FeedForward.FPropMeta(PARAMS, sizes)


def test_what_the_rules_cannot_split_has_no_cost():
    rules = make_lowering("model:2", "d_ff:model;embed:model")
    with lowering_scope(rules), pytest.raises(LayoutError, match="remove or change the rule"):
        FeedForward.FPropMeta(PARAMS, tshape.Shape([2, 3, 8]))


def test_a_layer_that_says_no_cost_is_named():
    class Mine(NamedLayer):
        """Has no CountCosts."""

    with pytest.raises(PartitionError, match=r"'cell_000' \(Mine\) has no FPropMeta"):
        layer_costs([Mine.Params()], tshape.Shape([2, 3, 8]))


def test_each_nonlinearity_says_what_its_gradient_reads():
    assert READ_BY_GRADIENT.keys() == ACTIVATIONS.keys()


def test_what_is_read_twice_counts_once():
    tally = Tally(make_lowering("model:2", "d_ff:model"))
    x = tally.given([2, 3, 8], "batch;length;embed", tf.float32)
    tally.keep(x, x)
    tally.keep(x)
    # On two processors.
    assert tally.activation_bytes == 2 * (2 * 3 * 8 * 4)


def test_a_part_has_the_dtypes_of_the_whole():
    tally = Tally(make_lowering("model:1"))
    whole = PARAMS.Copy().Set(dtype=tf.float64, fprop_dtype=tf.bfloat16)
    part = Norm.Params().Set(name="norm", input_dim=8)
    y = FeedForward.CountPart(whole, part, tally, tshape.Shape([2, 3, 8]))
    assert y.dtype == tf.bfloat16 and tally.parameter_bytes == 8 * 2 * 8
