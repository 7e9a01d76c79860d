"""What a tally refuses; what it counts is held against graphs in tests/conformance."""

import pytest
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import PartitionError
from pipemesh.layers import layer_costs
from pipemesh.layers.named import NamedLayer, TransformerBlock
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh, Shape


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


WINDOW = {"r": "p", "c": "q"}
# No layer has these; convolutions are in tests/conformance.
WINDOWS = [
    ("conv_transpose", "SAME", 2),
    ("conv_transpose", "VALID", 1),
    ("max_pool", "SAME", 2),
    ("avg_pool", "VALID", 2),
]


@pytest.mark.parametrize("rules", ["", "r:a;c:b", "n:b;r:a"])
@pytest.mark.parametrize(("kind", "padding", "stride"), WINDOWS)
def test_a_tally_counts_windows_as_programs_do(kind, padding, stride, rules):
    """Messages of both passes, and flops."""
    shapes = [Shape.from_text(text) for text in ("n:2;r:16;c:16;i:3", "p:3;q:3;i:3;o:2")]
    lowering = PlacementLowering(
        Mesh.from_text("a:2;b:2"), LayoutRules.from_text(rules), ["CPU:0"] * 4
    )
    strides = dict.fromkeys(WINDOW, stride)
    tally = Tally(lowering)
    x, w = (ops.import_tensor(lowering, tf.ones(shape.sizes), shape) for shape in shapes)
    given = Value(shapes[0], tf.float32), tally.weight(shapes[1], tf.float32)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        if kind == "conv_transpose":
            y = ops.conv_transpose(x, w, WINDOW, padding=padding, strides=stride)
            found = tally.convolution(*given, WINDOW, padding, strides, True)
        else:
            sizes = dict.fromkeys(WINDOW, 2)
            y = getattr(ops, kind)(x, sizes, padding=padding, strides=stride)
            found = tally.pooling(given[0], sizes, padding, strides, kind == "max_pool")
    tape.gradient(y, [x, w])
    assert found.shape == y.shape
    assert tally.costs.rows == lowering.costs.rows
    flops = [
        {key: row[1] for key, row in costs.work.items() if key[1].startswith(("conv", kind))}
        for costs in (tally.costs, lowering.costs)
    ]
    if kind == "max_pool":
        # Its two dims are one operation of a program.
        flops = [sum(by_key.values()) for by_key in flops]
    assert flops[0] == flops[1]
