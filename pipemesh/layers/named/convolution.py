"""A convolution of sequences, images or volumes with split rows, columns and channels."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_choice, check_flags, check_whole
from pipemesh.layers.named.feed_forward import ACTIVATIONS, count_activation
from pipemesh.layers.named.named_layer import SPACE, NamedLayer, within
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.elementwise import broadcast

_CONVOLUTIONS = {1: ops.conv1d, 2: ops.conv2d, 3: ops.conv3d}
_ACTIVATIONS = ("NONE", *(name for name, of in ACTIVATIONS.items() if of.parts == ("in",)))
_PADDINGS = ("SAME", "VALID")


class Convolution(NamedLayer):
    """A convolution, a bias and a nonlinearity; with `residual` the input is added to the result.

    The window has one to three numbers, for inputs `batch;length;channels`,
    `batch;height;width;channels` or `batch;depth;height;width;channels`. If one of the dims between
    `batch` and `channels` is split, each processor gets the border rows that its windows need from
    its neighbours. With a window of 3 rows and stride 1 this is one row from each side. A split of
    `channels` ends in an all-reduce. Filters may be split by their outputs, `features`. That is the
    name of the result's channels until they are gathered or take the split of `channels`.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers.named import Convolution, lowering_scope
        >>> from pipemesh.lowering import PlacementLowering
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> mesh, rules = Mesh.from_text("rows:2"), LayoutRules.from_text("height:rows")
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> params = Convolution.Params().Set(name="conv", input_dim=3, output_dim=8)
        >>> with lowering_scope(lowering), py_utils.VariableStore():
        ...     layer = params.Instantiate()
        ...     y = layer.FPropDefaultTheta(tf.ones([2, 6, 6, 3]))
        >>> y, lowering.costs.calls("permute")
        (Tensor('batch:2;height:6/rows;width:6;channels:8', float32), 2)
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, the window and its strides, the nonlinearity, the bias and `residual`."""
        p = super().Params()
        p.Define("input_dim", 0, "Number of channels.")
        p.Define("output_dim", 0, "Number of channels of the result.")
        p.Define("window", (3, 3), "Sizes of the window: of one, two or three dims.")
        p.Define("strides", 1, "Steps of the window: one number, or one for each dim.")
        p.Define("padding", "SAME", "'SAME': zeros around the image; or 'VALID': none.")
        p.Define("activation", "RELU", "'RELU', 'GELU', 'GELU_APPROXIMATE' or 'NONE'.")
        p.Define("use_bias", True, "Whether a bias is added to the products.")
        p.Define("residual", False, "Whether the input is added to the result.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "input_dim", p.input_dim, 1)
        check_whole(p.name, "output_dim", p.output_dim, 1)
        check_flags(p, ["use_bias", "residual"])
        check_choice(p.name, "padding", p.padding, _PADDINGS)
        check_choice(p.name, "activation", p.activation, _ACTIVATIONS)
        if not isinstance(p.window, tuple | list) or len(p.window) not in SPACE:
            raise PipelineError(
                f"{p.name}: window is {p.window!r}; give one to three numbers, as in (3, 3)"
            )
        if isinstance(p.strides, tuple | list) and len(p.strides) != len(p.window):
            raise PipelineError(
                f"{p.name}: strides are {p.strides!r}; give one number, or as many as window "
                f"{tuple(p.window)} has"
            )
        for name, numbers in (("window", p.window), ("strides", _strides(p).values())):
            for number in numbers:
                check_whole(p.name, name, number, 1)
        kept = p.padding == "SAME" and set(_strides(p).values()) == {1}
        kept = kept and p.input_dim == p.output_dim
        if p.residual and not kept:
            raise PipelineError(
                f"{p.name}: residual adds the input to the result, which has another shape with "
                f"input_dim {p.input_dim}, output_dim {p.output_dim}, strides {p.strides} "
                f"and padding {p.padding!r}; use equal dims, strides 1 and padding 'SAME', or "
                "leave residual unset"
            )

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w`, the filters, and `b`, their biases."""
        deviation = math.sqrt(2 / (math.prod(p.window) * p.input_dim))
        sizes = zip(_window(p).values(), p.window, strict=True)
        window = ";".join(f"{name}:{size}" for name, size in sizes)
        filters = f"{window};channels:{p.input_dim};features:{p.output_dim}"
        weights = {"w": (filters, py_utils.WeightInit.Gaussian(deviation))}
        if p.use_bias:
            weights["b"] = (f"features:{p.output_dim}", py_utils.WeightInit.Constant(0.0))
        return weights

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of each matrix."""
        return {"w": (";".join((*_window(p).values(), "channels")), "features")}

    def dims(self) -> set[str]:
        """Returns the names of the dims of its weights and inputs, which rules may split."""
        return {"batch", *_window(self.params), "channels", "features"}

    def FProp(self, theta: Any, x: Any) -> Tensor:
        """Computes the layer on `batch`, the dims of the window, and `channels`.

        With padding 'SAME', sizes are divided by the strides and rounded up.
        """
        p = self.params
        window = _window(p)
        x = self.Named(x, ("batch", *window, "channels"))
        filters = self.Weight(theta, "w")
        with within(self):
            y = _CONVOLUTIONS[len(window)](
                x, filters, window, padding=p.padding, strides=_strides(p)
            )

        def activated(value: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
            value = value + bias[0] if bias else value
            return value if p.activation == "NONE" else ACTIVATIONS[p.activation].function(value)

        if p.use_bias or p.activation != "NONE":
            y = broadcast(activated, [y, *([self.Weight(theta, "b")] if p.use_bias else [])])
        y = ops.rename(y, {"features": "channels"})
        return x + y if p.residual else y

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any) -> Value:
        """Counts the matmuls of all windows, and the rows sent to neighbours."""
        window = _window(p)
        x = tally.given(x, ("batch", *window, "channels"), py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        y = tally.convolution(x, weights["w"], window, p.padding, _strides(p))
        if p.activation != "NONE":
            y = count_activation(p.activation, tally, [y], [weights["b"]] if p.use_bias else [])
        elif p.use_bias:
            tally.elementwise(y, weights["b"])
        y = tally.rename(y, {"features": "channels"})
        if p.residual:
            tally.elementwise(x, y)
        return y


def _window(p: Any) -> dict[str, str]:
    """Returns the dims of the filters, by the dims that they slide over."""
    return {name: f"window_{name}" for name in SPACE[len(p.window)]}


def _strides(p: Any) -> dict[str, int]:
    """Returns the steps of the window by dims."""
    names = SPACE[len(p.window)]
    steps = p.strides if isinstance(p.strides, tuple | list) else [p.strides] * len(names)
    return dict(zip(names, steps, strict=True))
