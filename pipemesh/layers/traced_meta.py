"""Costs of a function, read from its graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.backend.static_shape import static_sizes


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
