"""A plain function as a layer, and the costs that are read from its graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, hyperparams, py_utils, tshape

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_no_live_layer, is_live_layer


def traced_meta(function: Callable[..., Any], specs: Sequence[tf.TensorSpec | None]) -> Any:
    """Traces a function without `FPropMeta` and returns its `flops` and `out_shapes`.

    Flops are two for each product of two numbers in matmuls and convolutions.

    Example:
        >>> meta = traced_meta(lambda x: x @ tf.ones([3, 5]), [tf.TensorSpec([2, 3])])
        >>> meta.flops, meta.out_shapes[0].ToTensorShape().as_list()
        (60, [2, 5])
    """
    given = [spec for spec in specs if spec is not None]

    def call(*tensors: tf.Tensor) -> Any:
        rest = iter(tensors)
        return function(*(None if spec is None else next(rest) for spec in specs))

    graph: Any = tf.function(call, autograph=False).get_concrete_function(*given).graph
    outputs = [t for t in tf.nest.flatten(graph.structured_outputs) if t is not None]
    return py_utils.NestedMap(
        flops=_products(graph),
        out_shapes=tuple(tshape.Shape(t.shape.as_list()) for t in outputs),
    )


def _products(graph: Any) -> int:
    """Returns the flops of the matmuls and convolutions of a graph with static shapes."""
    return sum(_flops(op) for op in graph.get_operations())


def _flops(op: tf.Operation) -> int:
    """Returns two flops for each product of two numbers that an operation sums."""
    if op.type in ("MatMul", "BatchMatMulV2"):
        name = "transpose_a" if op.type == "MatMul" else "adj_x"
        inner = static_sizes(op.inputs[0])[-2 if op.get_attr(name) else -1]
        return 2 * inner * math.prod(static_sizes(op.outputs[0]))
    if op.type == "Einsum":
        given, result = op.get_attr("equation").decode().split("->")
        names = given.split(",")
        # An ellipsis can only come first.
        sizes = {
            letter: size
            for text, tensor in zip(names, op.inputs, strict=True)
            for letter, size in zip(reversed(text), reversed(static_sizes(tensor)), strict=False)
            if letter not in f"{result}."
        }
        summed = math.prod(sizes.values()) * math.prod(static_sizes(op.outputs[0]))
        return 2 * summed if len(names) > 1 else 0
    if op.type in ("Conv2D", "Conv3D"):
        window = static_sizes(op.inputs[1])
        return 2 * math.prod(window[:-1]) * math.prod(static_sizes(op.outputs[0]))
    return 0


class FunctionParams(hyperparams.InstantiableParams):
    """The params of a `FunctionLayer`; their copies share the function.

    lingvo copies params everywhere, and a copy of the function would have new variables that are
    not trained.
    """

    def Copy(self) -> FunctionParams:
        """Copies all params but the function."""
        copied: Any = self.cls.Params()
        for name, value in self.IterParams():
            if name not in copied:
                copied.Define(name, None, "")
            copied.Set(**{name: value if name == "function" else copy.deepcopy(value)})
        return copied


class FunctionLayer(base_layer.BaseLayer):
    """A layer that calls a function of tensors, for use in place of any lingvo layer.

    The function may be any callable: a `tf.Module`, a bound method, a `functools.partial`. It is
    never copied, so the variables that it reads get gradients. They are not in `vars`: lingvo's
    learners and checkpoints skip them. Update and save them yourself, or write a layer with
    weights.

    Random numbers that the function draws are the same under every plan. A list of layers for
    `PartitionSequentialLayers` may contain plain functions. lingvo and Keras layers are errors
    here: they have their own params.

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
        # Params would treat any other attribute as a param.
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
        """Calls the function with `args`; a list of outputs becomes a tuple."""
        del theta
        outputs = self.params.function(*args)
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @classmethod
    def FPropMeta(cls, p: Any, *shapes: Any) -> Any:
        """Returns flops and output shapes; by default flops are those of matmuls and convolutions.

        Inputs count as tensors of the dtype that the layer computes in.
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
    """Returns params of a layer for a plain function; returns other values unchanged."""
    has_params = isinstance(value, type) or hasattr(value, "Instantiate") or is_live_layer(value)
    if callable(value) and not has_params:
        name = getattr(value, "__name__", type(value).__name__).strip("<>_") or "function"
        return FunctionLayer.Params().Set(name=name, function=value)
    return value
