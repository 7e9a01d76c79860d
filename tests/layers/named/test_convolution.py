"""The convolution equals plain TensorFlow."""

import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.layers.named import Convolution, lowering_scope
from tests.layers.named.harness import make_lowering, run, value_of

X = value_of("x", [4, 8, 6, 3])
PARAMS = Convolution.Params().Set(name="conv", input_dim=3, output_dim=4)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("rows:4", {}),
        ("rows:2;columns:2", {"strides": (2, 1), "window": (5, 2)}),
        ("rows:2;model:2", {"padding": "VALID", "activation": "NONE", "use_bias": False}),
        ("rows:2", {"output_dim": 3, "residual": True}),
    ],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(mesh, changes):
    p = PARAMS.Copy().Set(**changes)

    def plain(w):
        y = tf.nn.conv2d(X, w["w"], p.strides, p.padding)
        y = tf.nn.relu(y + w["b"]) if p.use_bias else y
        return X + y if p.residual else y

    found = run(p, [X], mesh, "height:rows;width:columns;features:model")
    found.assert_plain(plain)
    assert tuple(found.shapes["w"]) == (*p.window, X.shape[-1], p.output_dim)


@pytest.mark.parametrize(
    ("sizes", "strides", "window"), [([4, 8, 3], 2, (3,)), ([2, 4, 4, 4, 3], (1, 2, 1), (3, 2, 1))]
)
def test_one_and_three_dims(sizes, strides, window):
    x = value_of("x", sizes)
    p = PARAMS.Copy().Set(window=window, strides=strides, use_bias=False)
    rules = "length:rows;features:columns" if len(window) == 1 else "depth:rows;height:columns"

    def plain(w):
        if len(window) == 1:
            return tf.nn.relu(tf.nn.conv1d(x, w["w"], strides, p.padding))
        return tf.nn.relu(tf.nn.conv3d(x, w["w"], [1, *strides, 1], p.padding))

    run(p, [x], "rows:2;columns:2", rules).assert_plain(plain)


def test_one_row_goes_to_each_neighbour():
    result = run(PARAMS, [X], "rows:2", "height:rows")
    calls, sent = result.lowering.costs.rows[("rows",), "permute", "forward"]
    assert (calls, sent) == (2, 2 * 4 * 1 * 6 * 3 * 4)


def test_a_result_that_does_not_divide_is_an_error():
    lowering = make_lowering("rows:4", "height:rows")
    with lowering_scope(lowering), py_utils.VariableStore():
        layer = PARAMS.Copy().Set(padding="VALID").Instantiate()
        told = f"'{layer.params.name}': dim 'height' .* size 6, which axis 'rows' .*: 1, 2, 3, 6$"
        with pytest.raises(LayoutError, match=told):
            layer.FPropDefaultTheta(tf.constant(X))
        with pytest.raises(ShapeError, match=f"'{layer.params.name}': a window of 3 rows does not"):
            layer.FPropDefaultTheta(tf.constant(X[:, :, :2]))
