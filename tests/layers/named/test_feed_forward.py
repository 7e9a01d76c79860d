"""The feed-forward layer equals plain TensorFlow under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import FeedForward, lowering_scope
from tests.layers.named.harness import MESHES, make_lowering, reference, run, value_of

X = value_of("x", [4, 3, 6])
PARAMS = FeedForward.Params().Set(name="ff", input_dim=6, hidden_dim=8)
SHAPES = {"w_in": [6, 8], "b_in": [8], "w_out": [8, 6], "b_out": [6]}


def approximate_gelu(x):
    return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


PLAIN = {
    "RELU": lambda w: tf.maximum(X @ w["w_in"] + w["b_in"], 0.0),
    "GELU": lambda w: tf.nn.gelu(X @ w["w_in"] + w["b_in"]),
    # Hendrycks and Gimpel, "GELUs", 2016, section 2.
    "GELU_APPROXIMATE": lambda w: approximate_gelu(X @ w["w_in"] + w["b_in"]),
    "SWIGLU": lambda w: (
        (X @ w["w_in"] + w["b_in"])
        * (X @ w["w_gate"] + w["b_gate"])
        * tf.sigmoid(X @ w["w_gate"] + w["b_gate"])
    ),
}


@pytest.mark.parametrize(
    ("mesh", "activation"),
    [
        *((mesh, "RELU") for mesh in MESHES),
        ("model:2", "GELU"),
        ("model:2", "GELU_APPROXIMATE"),
        ("data:2;model:2", "SWIGLU"),
    ],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(mesh, activation):
    gate = {"w_gate": [6, 8], "b_gate": [8]} if activation == "SWIGLU" else {}
    wanted = reference(lambda w: PLAIN[activation](w) @ w["w_out"] + w["b_out"], {**SHAPES, **gate})
    found = run(PARAMS.Copy().Set(activation=activation), [X], mesh)
    found.assert_close(*wanted)
    calls, _ = found.lowering.costs.rows.get((("model",), "all_reduce", "forward"), (0, 0))
    assert calls == (0 if mesh == "model:1" else 1)


def test_without_biases():
    wanted = reference(
        lambda w: tf.nn.relu(X @ w["w_in"]) @ w["w_out"], {"w_in": [6, 8], "w_out": [8, 6]}
    )
    run(PARAMS.Copy().Set(use_bias=False), [X], "model:2").assert_close(*wanted)


@pytest.mark.parametrize("mesh", ["model:4", "data:2;model:2"])
def test_what_is_dropped_does_not_depend_on_the_layout(mesh):
    params = PARAMS.Copy().Set(dropout_rate=0.5)
    whole = run(params, [X])
    run(params, [X], mesh).assert_close(whole.outputs, whole.grads)
    assert abs(whole.outputs[0] - run(PARAMS, [X]).outputs[0]).max() > 0.1


@pytest.mark.parametrize("mesh", ["model:4", "data:2;model:2"])
def test_initial_values_are_those_of_the_whole_layer(mesh):
    whole = run(PARAMS, [X], scale=None)
    run(PARAMS, [X], mesh, scale=None).assert_close(whole.outputs, whole.grads)


def test_an_unknown_activation_is_an_error_with_the_nearest_name():
    with pytest.raises(PipelineError, match="activation is 'glu'; did you mean 'GELU'"):
        PARAMS.Copy().Set(activation="glu").Instantiate()


def test_hidden_values_that_do_not_divide_are_an_error_before_anything_runs():
    with (
        lowering_scope(make_lowering("model:4")),
        pytest.raises(LayoutError, match=r"'d_ff' .* size 10, which .* cannot cut into 4"),
    ):
        PARAMS.Copy().Set(hidden_dim=10).Instantiate()
