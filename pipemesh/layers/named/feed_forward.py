"""The feed-forward layer of a Transformer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers.check_params import check_choice, check_flags, check_whole
from pipemesh.layers.named.dropout import Dropout
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.elementwise import broadcast

# Functions of one hidden value, or of a hidden value and its gate.
ACTIVATIONS: dict[str, Callable[..., tf.Tensor]] = {
    "RELU": tf.nn.relu,
    "GELU": tf.nn.gelu,
    # By tanh, as in GPT-2; the name is lingvo's.
    "GELU_APPROXIMATE": lambda hidden: tf.nn.gelu(hidden, approximate=True),
    "SWIGLU": lambda hidden, gate: hidden * tf.nn.silu(gate),
}
GATED = ("SWIGLU",)


class FeedForward(NamedLayer):
    """Two products with a nonlinearity between them; SwiGLU (Shazeer, 2020) multiplies by a gate.

    With the rule `d_ff:model` each processor has a part of the hidden values: the first product
    needs no communication, and the second ends in one all-reduce (Shoeybi et al., "Megatron-LM",
    2019).
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
        """`w_in`, perhaps `w_gate`, `w_out`, and their biases."""
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
        """Computes the layer.

        Args:
            theta: weights.
            x: `batch;length;embed`.
        """
        p = self.params
        x = self.Named(x, "batch;length;embed")
        parts = ["in", "gate"] if p.activation in GATED else ["in"]
        products = [
            ops.einsum([x, self.Weight(theta, f"w_{part}")], ["batch", "length", "d_ff"])
            for part in parts
        ]
        biases = [self.Weight(theta, f"b_{part}") for part in parts] if p.use_bias else []
        activation = ACTIVATIONS[p.activation]

        def activated(*values: tf.Tensor) -> tf.Tensor:
            products, biases = values[: len(parts)], values[len(parts) :]
            return activation(*(map(tf.add, products, biases) if biases else products))

        hidden = broadcast(activated, [*products, *biases])
        hidden = self.dropout.FProp(theta.dropout, hidden)
        result = ops.einsum([hidden, self.Weight(theta, "w_out")], ["batch", "length", "embed"])
        return result + self.Weight(theta, "b_out") if p.use_bias else result

    @classmethod
    def FPropMeta(cls, p: Any, x: Any) -> Any:
        """Flops are those of the products, two for each weight and token."""
        products = 3 if p.activation in GATED else 2
        flops = 2 * x[0] * x[1] * products * p.input_dim * p.hidden_dim
        return py_utils.NestedMap(
            flops=flops, out_shapes=(x,), parameter_bytes=cls.ParameterBytes(p)
        )
