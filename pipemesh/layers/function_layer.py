"""A plain function as a layer of lingvo."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.traced_meta import traced_meta


class FunctionLayer(base_layer.BaseLayer):
    """Calls a function of tensors, to be used wherever a layer of lingvo is.

    It has no weights of its own; variables that the function reads are trained as those of any
    stage that captures them. What it draws at random is the same under every plan. A list of layers
    that `PartitionSequentialLayers` is to cut may hold functions as they are.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers import FunctionLayer
        >>> params = FunctionLayer.Params().Set(name="halve", function=lambda x: x / 2)
        >>> with py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> layer.FPropDefaultTheta(tf.ones([3])).numpy().tolist()
        [0.5, 0.5, 0.5]
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `function` and `flops`."""
        p = super().Params()
        p.Define("function", None, "Takes tensors or None, returns one or several.")
        p.Define(
            "flops",
            None,
            "Flops of the forward pass for a whole input, as a function of the inputs' shapes; by "
            "default those of the products of matrices and convolutions.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not callable(p.function):
            raise PipelineError(
                f"{p.name}: function is {p.function!r}; give a function of tensors, such as "
                "tf.nn.relu"
            )

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Calls the function.

        Args:
            theta: none.
            *args: its arguments.

        Returns:
            What it returns.
        """
        del theta
        outputs = self.params.function(*args)
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Flops, by default two for each product of a matrix or convolution, and output shapes.

        Inputs are taken for numbers of the dtype that the layer computes in.
        """
        dtype = py_utils.FPropDtype(p)
        specs = [
            None if shape is None else tf.TensorSpec(shape.ToTensorShape().as_list(), dtype)
            for shape in shapes
        ]
        meta = traced_meta(p.function, specs)
        if p.flops is not None:
            meta.flops = p.flops(*shapes)
        return meta


def as_layer(value: Any) -> Any:
    """Params of a layer for a plain function; anything else is returned as it is."""
    if callable(value) and not isinstance(value, type) and not hasattr(value, "Instantiate"):
        name = getattr(value, "__name__", type(value).__name__).strip("<>_") or "function"
        return FunctionLayer.Params().Set(name=name, function=value)
    return value
