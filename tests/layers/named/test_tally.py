"""What a tally refuses; what it counts is held against graphs in tests/conformance."""

import pytest
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import PartitionError
from pipemesh.layers import layer_costs
from pipemesh.layers.named import NamedLayer, TransformerBlock


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 8], "the shape .* was given for the dims 'batch;length;embed'; give one of each"),
        ([None, 3, 8], "every size has to be known"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(sizes, message):
    with pytest.raises(PartitionError, match=message):
        TransformerBlock.FPropMeta(TransformerBlock.Params(), sizes)


def test_a_layer_that_says_no_cost_is_named():
    class Mine(NamedLayer):
        """Has no CountCosts."""

    with pytest.raises(PartitionError, match=r"'cell_000' \(Mine\) has no FPropMeta"):
        layer_costs([Mine.Params()], tshape.Shape([2, 3, 8]))


def test_parts_have_the_dtypes_of_the_whole():
    params = TransformerBlock.Params().Set(input_dim=8, num_heads=2, hidden_dim=4)
    single, double = (
        TransformerBlock.FPropMeta(params.Copy().Set(dtype=dtype), [2, 3, 8])
        for dtype in (tf.float32, tf.float64)
    )
    assert double.parameter_bytes == 2 * single.parameter_bytes
