"""A convolution of images with split rows, columns and channels."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_choice, check_flags, check_whole
from pipemesh.layers.named.feed_forward import ACTIVATIONS, count_activation
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.elementwise import broadcast

_DIMS = "batch;height;width;channels"
_WINDOW = {"height": "window_height", "width": "window_width"}
_ACTIVATIONS = ("NONE", *(name for name, of in ACTIVATIONS.items() if of.parts == ("in",)))
_PADDINGS = ("SAME", "VALID")


class Convolution(NamedLayer):
    """A convolution, a bias and a nonlinearity; with `residual` the input is added to the result.

    If `height` or `width` is split, each processor gets the border rows that its windows need from
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
        p.Define("window", (3, 3), "Height and width of the window.")
        p.Define("strides", (1, 1), "Steps of the window, down and to the right.")
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
        for name in ("window", "strides"):
            numbers = getattr(p, name)
            if not isinstance(numbers, tuple | list) or len(numbers) != 2:
                raise PipelineError(
                    f"{p.name}: {name} is {numbers!r}; give two numbers, as in (3, 3)"
                )
            for number in numbers:
                check_whole(p.name, name, number, 1)
        kept = p.padding == "SAME" and tuple(p.strides) == (1, 1) and p.input_dim == p.output_dim
        if p.residual and not kept:
            raise PipelineError(
                f"{p.name}: residual adds the input to the result, which has another shape with "
                f"input_dim {p.input_dim}, output_dim {p.output_dim}, strides {tuple(p.strides)} "
                f"and padding {p.padding!r}; use equal dims, strides (1, 1) and padding 'SAME', or "
                "leave residual unset"
            )

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w`, the filters, and `b`, their biases."""
        height, width = p.window
        deviation = math.sqrt(2 / (height * width * p.input_dim))
        window = f"window_height:{height};window_width:{width}"
        filters = f"{window};channels:{p.input_dim};features:{p.output_dim}"
        weights = {"w": (filters, py_utils.WeightInit.Gaussian(deviation))}
        if p.use_bias:
            weights["b"] = (f"features:{p.output_dim}", py_utils.WeightInit.Constant(0.0))
        return weights

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of each matrix."""
        return {"w": ("window_height;window_width;channels", "features")}

    def dims(self) -> set[str]:
        """Returns the names of the dims of its weights and inputs, which rules may split."""
        return {"batch", *_WINDOW, "channels", "features"}

    def FProp(self, theta: Any, x: Any) -> Tensor:
        """Computes the layer on `batch;height;width;channels`.

        With padding 'SAME', height and width are divided by the strides and rounded up.
        """
        p = self.params
        x = self.Named(x, _DIMS)
        y = ops.conv2d(
            x,
            self.Weight(theta, "w"),
            _WINDOW,
            padding=p.padding,
            strides=dict(zip(_WINDOW, p.strides, strict=True)),
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
        x = tally.given(x, _DIMS, py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        steps = dict(zip(_WINDOW, p.strides, strict=True))
        y = tally.convolution(x, weights["w"], _WINDOW, p.padding, steps)
        if p.activation != "NONE":
            y = count_activation(p.activation, tally, [y], [weights["b"]] if p.use_bias else [])
        elif p.use_bias:
            tally.meet(y, weights["b"])
        y = tally.rename(y, {"features": "channels"})
        if p.residual:
            tally.meet(x, y)
        return y
