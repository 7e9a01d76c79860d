"""The feed-forward layer of a Transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers.check_params import check_choice, check_flags, check_whole
from pipemesh.layers.named.dropout import Dropout
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.named.whole_length import split_names, whole_dims, whole_names
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.einsum import products
from pipemesh.lowering.ops.elementwise import broadcast

# Functions of one hidden value, or of a hidden value and its gate.
ACTIVATIONS: dict[str, Callable[..., tf.Tensor]] = {
    "RELU": tf.nn.relu,
    "GELU": tf.nn.gelu,
    # The tanh approximation, as in GPT-2; the name is lingvo's.
    "GELU_APPROXIMATE": lambda hidden: tf.nn.gelu(hidden, approximate=True),
    "SWIGLU": lambda hidden, gate: hidden * tf.nn.silu(gate),
}
GATED = ("SWIGLU",)
# The number of tensors of a hidden value's size that the gradient reads, and whether it reads the
# result too.
READ_BY_GRADIENT = {
    "RELU": (0, True),
    "GELU": (3, False),
    "GELU_APPROXIMATE": (4, False),
    "SWIGLU": (3, False),
}


class FeedForward(NamedLayer):
    """Two matmuls with a nonlinearity between them; SwiGLU (Shazeer, 2020) multiplies by a gate.

    With the rule `d_ff:model` each processor has a slice of the hidden values. The first matmul
    needs no communication, and the second ends in one all-reduce (Shoeybi et al., "Megatron-LM",
    2019). With `length:model` beside it, inputs and outputs are split along `length`. Then there is
    one all-gather and one reduce-scatter.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `activation`, `use_bias` and `dropout_rate`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("hidden_dim", 0, "Size of `d_ff`.")
        p.Define("activation", "RELU", "'RELU', 'GELU', 'GELU_APPROXIMATE' or 'SWIGLU'.")
        p.Define("use_bias", True, "Whether biases are added to the products.")
        p.Define("dropout_rate", 0.0, "Dropout rate of the hidden values.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "input_dim", p.input_dim, 1)
        check_whole(p.name, "hidden_dim", p.hidden_dim, 1)
        check_flags(p, ["use_bias"])
        check_choice(p.name, "activation", p.activation, ACTIVATIONS)
        self.CreateChild("dropout", Dropout.Params().Set(rate=p.dropout_rate))

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w_in`, `w_gate` if gated, `w_out`, and their biases."""
        embed, hidden = f"embed:{p.input_dim}", f"d_ff:{p.hidden_dim}"
        first = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        second = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.hidden_dim))
        zero = py_utils.WeightInit.Constant(0.0)
        weights: dict[str, Any] = {"w_in": (f"{embed};{hidden}", first)}
        biases: dict[str, Any] = {"b_in": (hidden, zero)}
        if p.activation in GATED:
            weights["w_gate"], biases["b_gate"] = weights["w_in"], biases["b_in"]
        weights["w_out"], biases["b_out"] = (f"{hidden};{embed}", second), (embed, zero)
        return {**weights, **biases} if p.use_bias else weights

    def FProp(self, theta: Any, x: Any) -> Tensor:
        """Computes the layer on `batch;length;embed`."""
        p = self.params
        x = self.Named(x, "batch;length;embed")
        parts = ["in", "gate"] if p.activation in GATED else ["in"]
        weights = [self.Weight(theta, f"w_{part}") for part in parts]
        names = whole_names(x.lowering.rules, "d_ff")
        hidden_dims = [["batch", names.get("length", "length"), "d_ff"]] * len(parts)
        into = products(x, weights, hidden_dims, names)
        biases = [self.Weight(theta, f"b_{part}") for part in parts] if p.use_bias else []
        activation = ACTIVATIONS[p.activation]

        def activated(*values: tf.Tensor) -> tf.Tensor:
            into, biases = values[: len(parts)], values[len(parts) :]
            return activation(*(map(tf.add, into, biases) if biases else into))

        hidden = broadcast(activated, [*into, *biases])
        hidden = self.dropout.FProp(theta.dropout, hidden)
        dims = [*hidden_dims[0][:2], "embed"]
        result = ops.einsum([hidden, self.Weight(theta, "w_out")], dims, split_names(names))
        return result + self.Weight(theta, "b_out") if p.use_bias else result

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any) -> Value:
        """Counts the matmuls and the tensors that the nonlinearity's gradient reads."""
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        parts = ["in", "gate"] if p.activation in GATED else ["in"]
        names = whole_names(tally.lowering.rules, "d_ff")
        dims = [whole_dims("batch;length;d_ff", names)] * len(parts)
        products = tally.products(x, [weights[f"w_{part}"] for part in parts], dims, names)
        biases = [weights[f"b_{part}"] for part in parts] if p.use_bias else []
        hidden = count_activation(p.activation, tally, products, biases)
        hidden = cls.CountPart(p, Dropout.Params().Set(rate=p.dropout_rate), tally, hidden)
        dims = whole_dims("batch;length;embed", names)
        result = tally.einsum([hidden, weights["w_out"]], dims, names=split_names(names))
        if p.use_bias:
            tally.meet(result, weights["b_out"])
        return result


def count_activation(
    activation: str, tally: Tally, products: Sequence[Value], biases: Sequence[Value] = ()
) -> Value:
    """Counts the tensors that the gradient of a nonlinearity reads, and returns its result."""
    tally.meet(*products, *biases)
    read, reads_result = READ_BY_GRADIENT[activation]
    shape = products[0].shape
    tally.keep(*(tally.made(shape, products[0]) for _ in range(read)))
    result = tally.made(shape, products[0])
    if reads_result:
        tally.keep(result)
    return result
