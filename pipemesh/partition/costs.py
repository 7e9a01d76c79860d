"""What one layer costs, and how a user's list of costs becomes arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pipemesh.errors import PartitionError

Floats = npt.NDArray[np.float64]

_EXACT_INTEGERS = 2.0**53
"""Up to here a float holds every integer."""


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """What one layer costs to train on one microbatch.

    Time may be in any unit (seconds, FLOPs, milliseconds) as long as every layer uses the same
    one; with `bandwidth` it has to be the unit in which the bandwidth counts (seconds, when the
    bandwidth is in bytes per second). Bytes are bytes.

    Attributes:
        forward: time of the forward pass of one microbatch.
        backward: time of the backward pass of one microbatch, without recomputing the forward
            pass; `None` means twice `forward`, which is what matrix products take: one product
            for the gradient of the input and one for the gradient of the weights.
        parameter_bytes: bytes of the layer's trained parameters.
        activation_bytes: bytes that the layer keeps from the forward pass of one microbatch for
            its backward pass.
        boundary_bytes: bytes of the layer's output for one microbatch: what crosses to the next
            device if a stage ends here. The gradient that comes back has the same size.
        shared_bytes: bytes among `activation_bytes` that the layer before keeps as well, such as
            an input that is the other's output: kept once if both lie in one stage. Of the first
            layer they do not count.
        name: what messages and tables call the layer; empty means its index.

    Raises:
        PartitionError: a number is negative, infinite or not a number, or more is shared than kept.

    Example:
        >>> LayerCost(forward=2.0).total
        6.0
    """

    forward: float
    _: dataclasses.KW_ONLY
    backward: float | None = None
    parameter_bytes: float = 0
    activation_bytes: float = 0
    boundary_bytes: float = 0
    shared_bytes: float = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PartitionError(f"name of a layer is {self.name!r}, but must be a text")
        for field in NUMBERS:
            value: Any = getattr(self, field)
            if field == "backward" and value is None:
                continue
            problem = number_problem(value)
            if problem:
                label = f" of layer {self.name!r}" if self.name else ""
                raise PartitionError(f"{field}{label} is {value!r}, {problem}")
        if float(self.shared_bytes) > float(self.activation_bytes):
            label = f" of layer {self.name!r}" if self.name else ""
            raise PartitionError(
                f"shared_bytes{label} is {self.shared_bytes}, but must be among its "
                f"activation_bytes, which are {self.activation_bytes}"
            )

    @property
    def total(self) -> float:
        """Time of the forward and the backward pass of one microbatch."""
        return float(self.forward) + self.backward_or_default

    @property
    def backward_or_default(self) -> float:
        """`backward`, or twice `forward` where none was given."""
        return 2.0 * float(self.forward) if self.backward is None else float(self.backward)


NUMBERS = (
    "forward",
    "backward",
    "parameter_bytes",
    "activation_bytes",
    "boundary_bytes",
    "shared_bytes",
)


def number_problem(value: object) -> str:
    """Says what is wrong with a cost, or nothing.

    Args:
        value: what a user gave as a cost.

    Returns:
        A clause such as `"but must be finite"`, empty if the value is fine.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (Real, Decimal)):
        return "but must be a number"
    try:
        number = float(value)
    except OverflowError:
        return "which is too large for a float; give the costs in a larger unit"
    except ValueError:
        # Decimal's signaling NaN.
        number = math.nan
    if math.isnan(number):
        return "which is not a number; every cost must be finite and not negative"
    if math.isinf(number):
        return "but every cost must be finite"
    if number < 0:
        return "but every cost must be zero or more"
    if isinstance(value, Integral) and int(number) != int(value):
        return f"which a float rounds to {number:.0f}; give the costs in a larger unit"
    return ""


def whole(name: str, value: object, least: int) -> int:
    """Checks a whole number.

    Args:
        name: of the option.
        value: what was given.
        least: the smallest number allowed.

    Returns:
        The number.

    Raises:
        PartitionError: it is no whole number or too small.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise PartitionError(f"{name} is {value!r}, but must be a whole number, {least} or more")
    number = int(cast("int", value))
    if number < least:
        raise PartitionError(f"{name} is {number}, but must be {least} or more")
    return number


def is_sequence(value: object) -> bool:
    """Whether a value is a sequence of items: not a text, nor a mapping or a set, nor one number.

    Example:
        >>> is_sequence([1, 2]), is_sequence({0: 1}), is_sequence({1, 2}), is_sequence("12")
        (True, False, False, False)
    """
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return hasattr(value, "__len__") and hasattr(value, "__iter__")


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """The costs of all layers as columns.

    Attributes:
        forward: time of the forward pass of each layer; for plain numbers, the whole cost.
        backward: time of the backward pass of each layer; for plain numbers, zero.
        parameter_bytes: bytes of parameters of each layer.
        activation_bytes: bytes of kept activations of each layer and one microbatch.
        boundary_bytes: bytes of the output of each layer and one microbatch.
        shared_bytes: bytes of the activations of each layer that the one before keeps as well.
        names: what to call each layer; empty strings where no name was given.
        detailed: whether the user gave `LayerCost`s and not plain numbers.
    """

    forward: Floats
    backward: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    boundary_bytes: Floats
    shared_bytes: Floats
    names: tuple[str, ...]
    detailed: bool

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return int(self.forward.size)

    def label(self, layer: int) -> str:
        """Names a layer for a message.

        Args:
            layer: index of the layer.

        Returns:
            For example `"layer 3 ('attention')"`.
        """
        name = self.names[layer] if self.names else ""
        return f"layer {layer} ({name!r})" if name else f"layer {layer}"


def as_stack(costs: Sequence[float] | Sequence[LayerCost] | npt.NDArray[Any]) -> Stack:
    """Turns a user's costs into columns and checks them.

    Args:
        costs: numbers, a flat array, or `LayerCost`s; not a mixture.

    Returns:
        The columns.

    Raises:
        PartitionError: no costs, a cost that is no finite number of zero or more, a mixture of
            numbers and `LayerCost`s, or costs that are all zero.
    """
    if not is_sequence(costs):
        raise PartitionError(
            f"costs is {type(costs).__name__}, but must be a sequence of numbers or of LayerCost"
        )
    if len(costs) == 0:
        raise PartitionError("costs is empty; give a non-empty sequence, one cost a layer")
    if isinstance(costs, np.ndarray) and costs.dtype != object:
        stack = _from_numbers(costs)
    else:
        kinds = [isinstance(cost, LayerCost) for cost in costs]
        if all(kinds):
            stack = _from_layer_costs(list(costs))  # type: ignore[arg-type]
        elif any(kinds):
            raise PartitionError(
                f"costs[{kinds.index(False)}] is a {type(costs[kinds.index(False)]).__name__} and "
                f"costs[{kinds.index(True)}] a LayerCost; give numbers only or LayerCost only"
            )
        else:
            stack = _from_list(list(costs))
    with np.errstate(over="ignore"):
        total = float(stack.forward.sum() + stack.backward.sum())
    if not math.isfinite(total):
        raise PartitionError(
            "the sum of the costs is too large for a float; give the costs in a larger unit"
        )
    if total == 0:
        raise PartitionError(
            f"the costs of all {stack.num_layers} layers are zero, so every cut is as good as any "
            "other; give at least one cost above zero (all ones for an even cut)"
        )
    return stack


def _from_list(costs: list[Any]) -> Stack:
    try:
        # Strings would become numbers here, so only lists that NumPy reads as numbers pass.
        values = np.asarray(costs)
    except ValueError:
        values = np.empty(0, dtype=object)
    if values.ndim == 1 and values.dtype.kind in "iuf" and bool not in set(map(type, costs)):
        return _from_numbers(values)
    for index, cost in enumerate(costs):
        problem = number_problem(cost)
        if problem:
            raise PartitionError(f"costs[{index}] is {cost!r}, {problem}")
    return _from_numbers(np.asarray([float(cost) for cost in costs]))


def _from_numbers(values: npt.NDArray[Any]) -> Stack:
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise PartitionError(
            "costs must be a flat sequence of numbers; "
            f"got an array of shape {values.shape} and dtype {values.dtype}"
        )
    numbers = values.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers) | (numbers < 0) | (numbers >= _EXACT_INTEGERS))
    for index in bad.tolist():
        problem = number_problem(values[index])
        if problem:
            raise PartitionError(f"costs[{index}] is {values[index]}, {problem}")
    zeros = np.zeros_like(numbers)
    return Stack(numbers, zeros, zeros, zeros, zeros, zeros, names=(), detailed=False)


def _from_layer_costs(costs: list[LayerCost]) -> Stack:
    def column(values: list[float]) -> Floats:
        return np.asarray(values, dtype=np.float64)

    return Stack(
        forward=column([cost.forward for cost in costs]),
        backward=column([cost.backward_or_default for cost in costs]),
        parameter_bytes=column([cost.parameter_bytes for cost in costs]),
        activation_bytes=column([cost.activation_bytes for cost in costs]),
        boundary_bytes=column([cost.boundary_bytes for cost in costs]),
        # Nothing is in front of the first layer.
        shared_bytes=column([0.0, *(cost.shared_bytes for cost in costs[1:])]),
        names=tuple(cost.name for cost in costs),
        detailed=True,
    )
