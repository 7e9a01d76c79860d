"""A plain function as a layer of lingvo."""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, hyperparams, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_no_live_layer, is_live_layer
from pipemesh.layers.traced_meta import traced_meta


class FunctionParams(hyperparams.InstantiableParams):
    """The params of a `FunctionLayer`: their copies have the same function.

    lingvo copies params wherever it takes them, and a copy of the function would have variables of
    its own, which nobody trains.
    """

    def Copy(self) -> FunctionParams:
        """Copies all but the function."""
        copied: Any = self.cls.Params()
        for name, value in self.IterParams():
            if name not in copied:
                copied.Define(name, None, "")
            copied.Set(**{name: value if name == "function" else copy.deepcopy(value)})
        return copied


class FunctionLayer(base_layer.BaseLayer):
    """Calls a function of tensors, to be used wherever a layer of lingvo is.

    The function may be anything that can be called: a `tf.Module`, a bound method, a
    `functools.partial`. It is never copied, so the variables that it reads get their gradients.
    They are not in `vars`: a learner and a checkpoint of lingvo do not know them, so update and
    save them yourself, or write a layer with weights. What the function draws at random is the same
    under every plan. A list of layers that `PartitionSequentialLayers` is to cut may hold functions
    as they are. Layers of lingvo and Keras have params of their own and are refused.

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
        p: Any = super().Params()
        # Params take any other attribute for a param.
        object.__setattr__(p, "__class__", FunctionParams)
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
        check_no_live_layer(f"{p.name}: function", p.function)
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
    has_params = isinstance(value, type) or hasattr(value, "Instantiate") or is_live_layer(value)
    if callable(value) and not has_params:
        name = getattr(value, "__name__", type(value).__name__).strip("<>_") or "function"
        return FunctionLayer.Params().Set(name=name, function=value)
    return value
