"""Measured costs: forward and backward seconds and bytes of real layers."""
# TensorFlow is imported by name, and only when layers are measured. So this room can be imported,
# and checked by import-linter, without it.

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from pipemesh.errors import PartitionError
from pipemesh.partition.costs import LayerCost


@dataclasses.dataclass(frozen=True)
class MeasuredCost(LayerCost):
    """A measured `LayerCost`, in seconds and bytes.

    Attributes:
        forward_spread: seconds between the quartiles of the forward times, to judge their noise.
        backward_spread: the same for the times of forward and backward pass together.

    Example:
        >>> MeasuredCost(forward=1.0, forward_spread=0.1).total
        3.0
    """

    forward_spread: float = 0.0
    backward_spread: float = 0.0


def profile_costs(
    callables: Sequence[Callable[..., Any]],
    example_inputs: Any,
    *,
    warm_up: int = 3,
    repeats: int = 15,
    names: Sequence[str] | None = None,
) -> list[MeasuredCost]:
    """Measures the layers of a stack on this machine, one after the other.

    The first layer gets `example_inputs`, every other one the outputs of the layer before. Each
    layer is compiled to a graph once, run `warm_up` times unmeasured, then `repeats` times
    forward and `repeats` times forward and backward. These alternate, so that a slow moment of the
    machine hits both. The time of calling an empty graph is subtracted. The results are medians,
    which a few disturbed runs do not move.

    Args:
        callables: Keras layers, lingvo layers (with `FPropDefaultTheta`), or functions of tensors.
        example_inputs: one microbatch: a tensor or array, or a tuple of them.
        warm_up: runs before measuring.
        repeats: measured runs.
        names: names of the layers; by default those of the layers or functions themselves.

    Returns:
        One cost a layer, in seconds and bytes, ready for `partition`. Activation bytes are those
        of all forward tensors that the backward graph reads, without weights and constants. Tensors
        inside a layer's own compiled functions count only if they leave them.

    Raises:
        PartitionError: there are no layers, `warm_up` or `repeats` is below 1, `names` has another
            length, a layer returns no tensors, or no gradient reaches its weights.

    Example:
        >>> import tensorflow as tf
        >>> costs = profile_costs([tf.nn.relu, tf.math.square], tf.ones([4, 8]), repeats=3)
        >>> [cost.boundary_bytes for cost in costs]
        [128, 128]
    """
    layers = list(callables)
    if not layers:
        raise PartitionError("callables is empty; give one callable a layer")
    if warm_up < 1 or repeats < 1:
        raise PartitionError(
            f"warm_up is {warm_up} and repeats is {repeats}, but both must be 1 or more"
        )
    if names is not None and len(names) != len(layers):
        raise PartitionError(
            f"names has {len(names)} entries for {len(layers)} callables; give one a callable"
        )
    tf: Any = importlib.import_module("tensorflow")
    inputs = _as_tuple(tf, example_inputs)
    costs: list[MeasuredCost] = []
    for index, layer in enumerate(layers):
        name = names[index] if names is not None else _name(layer)
        cost, inputs = _measure(tf, layer, name, index, inputs, warm_up, repeats)
        costs.append(cost)
    return costs


def _as_tuple(tf: Any, values: Any) -> tuple[Any, ...]:
    parts = cast("tuple[Any, ...]", values) if isinstance(values, (tuple, list)) else (values,)
    return tuple(None if part is None else tf.convert_to_tensor(part) for part in parts)


def _name(layer: Any) -> str:
    # lingvo layers keep their name in params; their own attribute has a prefix of the framework.
    for owner, attribute in (
        (getattr(layer, "params", None), "name"),
        (layer, "name"),
        (layer, "__name__"),
    ):
        name = getattr(owner, attribute, None)
        if isinstance(name, str) and name and name != "<lambda>":
            return name
    return ""


def _weights(layer: Any) -> list[Any]:
    variables: Any = getattr(layer, "trainable_variables", None)
    if variables is None and hasattr(layer, "vars"):
        variables = layer.vars.Flatten()
    # Keras 3 wraps `tf.Variable`s, and gradients need the ones inside; a `tf.Variable` has a method
    # of the same name.
    return [
        variable if callable(getattr(variable, "value", print)) else variable.value
        for variable in cast("list[Any]", variables or [])
    ]


def _measure(
    tf: Any,
    layer: Any,
    name: str,
    index: int,
    inputs: tuple[Any, ...],
    warm_up: int,
    repeats: int,
) -> tuple[MeasuredCost, tuple[Any, ...]]:
    # lingvo layers keep their weights in theta and are called through FProp.
    call = getattr(layer, "FPropDefaultTheta", layer)
    # Once outside of a graph: layers create their weights in their first call.
    first = call(*inputs)
    outputs = _as_tuple(tf, first)
    if not outputs or all(part is None for part in outputs):
        raise PartitionError(
            f"layer {index} ({name!r}) returned no tensors; it must return at least one"
        )
    weights = _weights(layer)
    kept: list[int] = []

    def unchanged(*args: Any) -> Any:
        return [part for part in args if part is not None]

    def forward_of(*args: Any) -> Any:
        return [part for part in _as_tuple(tf, call(*args)) if part is not None]

    def both_of(*args: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        floats = [part for part in args if part is not None and part.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            results = forward_of(*args)
        before = {op.name for op in graph.get_operations()}
        targets = [part for part in results if part.dtype.is_floating]
        gradients = tape.gradient(targets, [*weights, *floats])
        kept.append(_read_by_gradients(graph, before))
        return results, [part for part in gradients if part is not None]

    forward = tf.function(forward_of, autograph=False)
    both = tf.function(both_of, autograph=False)
    empty = tf.function(unchanged, autograph=False)
    for _ in range(warm_up):
        _run(tf, empty, inputs)
        _run(tf, forward, inputs)
        gradients = _run(tf, both, inputs)[1][1]
    if weights and not gradients:  # pyright: ignore[reportPossiblyUnboundVariable]
        raise PartitionError(
            f"layer {index} ({name!r}) has weights, but no gradient reaches them; make its outputs "
            "depend on them by differentiable operations"
        )
    calls: list[float] = []
    ahead: list[float] = []
    whole: list[float] = []
    for _ in range(repeats):
        calls.append(_run(tf, empty, inputs)[0])
        ahead.append(_run(tf, forward, inputs)[0])
        whole.append(_run(tf, both, inputs)[0])
    seconds = statistics.median(ahead)
    cost = MeasuredCost(
        forward=max(seconds - statistics.median(calls), 0.0),
        backward=max(statistics.median(whole) - seconds, 0.0),
        parameter_bytes=sum(_bytes(weight) for weight in weights),
        activation_bytes=kept[-1],
        boundary_bytes=sum(_bytes(part) for part in outputs if part is not None),
        name=name,
        forward_spread=_spread(ahead),
        backward_spread=_spread(whole),
    )
    return cost, outputs


def _run(tf: Any, function: Any, inputs: tuple[Any, ...]) -> tuple[float, Any]:
    begin = time.perf_counter()
    results = function(*inputs)
    # Accelerators run behind; a time ends when the device is done.
    tf.test.experimental.sync_devices()
    return time.perf_counter() - begin, results


def _spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high - low


def _bytes(tensor: Any) -> int:
    elements = tensor.shape.num_elements() if hasattr(tensor.shape, "num_elements") else None
    return int(tensor.dtype.size) * int(elements or 0)


def _read_by_gradients(graph: Any, before: set[str]) -> int:
    """Returns the bytes of forward tensors that later operations read."""
    tensors: dict[str, Any] = {}
    for operation in graph.get_operations():
        if operation.name in before:
            continue
        for tensor in operation.inputs:
            source = tensor.op
            if source.name not in before or source.type in ("Const", "ReadVariableOp"):
                continue
            if tensor.dtype.size and tensor.dtype.name != "resource":
                tensors[tensor.name] = tensor
    return sum(_bytes(tensor) for tensor in tensors.values())
