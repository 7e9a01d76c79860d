"""Costs of layers: the values that users give, as columns of floats and as exact integers.

In floating point `0.1 + 0.2 != 0.3`, and a partitioner that compares such sums takes one of two
equal cuts for the better one. So every number becomes an integer multiple of a common unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from pipemesh.errors import PartitionError

Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[Any]
"""An array of `int64`, or of Python integers where `int64` is too small."""

SUM_LIMIT = 2**60
"""Sums stay below this, so that two of them still add up in an `int64`."""

_EXACT_INTEGERS = 2**53
"""Up to here a float holds every integer."""

_MOST_DECIMALS = 15

NUMBERS = (
    "forward",
    "backward",
    "parameter_bytes",
    "activation_bytes",
    "boundary_bytes",
    "shared_bytes",
)
"""Fields of a `LayerCost` that hold numbers."""


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Time and bytes that one layer takes in training, for one microbatch.

    Time may be in any unit (seconds, FLOPs, milliseconds) as long as every layer uses the same
    one; with `bandwidth` it has to be the unit in which the bandwidth counts (seconds, when the
    bandwidth is in bytes per second). Bytes are bytes.

    Attributes:
        forward: time of the forward pass of one microbatch.
        backward: time of the backward pass of one microbatch, without recomputing the forward
            pass. `None` means twice `forward`, as for matrix products: one product for the gradient
            of the input and one for the gradient of the weights.
        parameter_bytes: bytes of the layer's trained parameters.
        activation_bytes: bytes that the layer keeps from the forward pass of one microbatch for
            its backward pass.
        boundary_bytes: bytes of the layer's output for one microbatch. If a stage ends here, they
            go to the next device, and a gradient of the same size comes back.
        shared_bytes: bytes among `activation_bytes` that the layer before keeps too, such as an
            input that is the other layer's output. One stage keeps them once. Ignored for the
            first layer.
        name: name of the layer in messages and tables; its index if empty.

    Raises:
        PartitionError: a number is negative or not finite, or `shared_bytes` exceeds
            `activation_bytes`.

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
            raise PartitionError(f"name of a layer is {self.name!r}, but must be a string")
        label = f" of layer {self.name!r}" if self.name else ""
        for field in NUMBERS:
            value: Any = getattr(self, field)
            problem = "" if field == "backward" and value is None else number_problem(value)
            if problem:
                raise PartitionError(f"{field}{label} is {value!r}, {problem}")
        if float(self.shared_bytes) > float(self.activation_bytes):
            raise PartitionError(
                f"shared_bytes{label} is {self.shared_bytes}, but its activation_bytes are only "
                f"{self.activation_bytes}; shared_bytes count among them"
            )

    @property
    def total(self) -> float:
        """Time of the forward and the backward pass of one microbatch."""
        return float(self.forward) + self.backward_or_default

    @property
    def backward_or_default(self) -> float:
        """`backward`, or twice `forward` if it is `None`."""
        return 2.0 * float(self.forward) if self.backward is None else float(self.backward)


def number_problem(value: object) -> str:
    """Returns why a value is no valid cost, as a clause of a message; empty if it is valid."""
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
    """Returns a whole number that is at least `least`; raises an error that names the option."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise PartitionError(f"{name} is {value!r}, but must be a whole number, {least} or more")
    number = int(cast("int", value))
    if number < least:
        raise PartitionError(f"{name} is {number}, but must be {least} or more")
    return number


def is_sequence(value: object) -> bool:
    """Returns True for lists, tuples and arrays; False for strings, mappings, sets and numbers."""
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return hasattr(value, "__len__") and hasattr(value, "__iter__")


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """The costs of all layers as columns; `detailed` if they came as `LayerCost`s."""

    forward: Floats  # Of plain numbers, the whole cost.
    backward: Floats  # Of plain numbers, zero.
    parameter_bytes: Floats
    activation_bytes: Floats
    boundary_bytes: Floats
    shared_bytes: Floats
    names: tuple[str, ...]
    detailed: bool

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self.forward.size)

    def label(self, layer: int) -> str:
        """Returns the layer's name for a message, such as `"layer 3 ('attention')"`."""
        name = self.names[layer] if self.names else ""
        return f"layer {layer} ({name!r})" if name else f"layer {layer}"


def as_stack(costs: Sequence[float] | Sequence[LayerCost] | npt.NDArray[Any]) -> Stack:
    """Turns numbers or `LayerCost`s into columns; raises an error if they are invalid."""
    if not is_sequence(costs):
        raise PartitionError(
            f"costs is {type(costs).__name__}, but must be a sequence of numbers or of LayerCost"
        )
    if len(costs) == 0:
        raise PartitionError("costs is empty; give one cost a layer")
    if isinstance(costs, np.ndarray) and costs.dtype != object:
        if costs.ndim != 1 or costs.dtype.kind not in "iuf":
            raise PartitionError(
                "costs must be a flat sequence of numbers; "
                f"got an array of shape {costs.shape} and dtype {costs.dtype}"
            )
        costs = costs.tolist()
    kinds = [isinstance(cost, LayerCost) for cost in costs]
    if all(kinds):
        stack = _from_layer_costs(list(costs))  # type: ignore[arg-type]
    elif any(kinds):
        raise PartitionError(
            f"costs[{kinds.index(False)}] is a {type(costs[kinds.index(False)]).__name__} and "
            f"costs[{kinds.index(True)}] a LayerCost; give numbers only or LayerCost only"
        )
    else:
        stack = _from_numbers(list(costs))
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


def _from_numbers(costs: list[Any]) -> Stack:
    for index, cost in enumerate(costs):
        problem = number_problem(cost)
        if problem:
            raise PartitionError(f"costs[{index}] is {cost!r}, {problem}")
    numbers = np.asarray([float(cost) for cost in costs])
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
        # The first layer has no layer before it.
        shared_bytes=column([0.0, *(cost.shared_bytes for cost in costs[1:])]),
        names=tuple(cost.name for cost in costs),
        detailed=True,
    )


def to_integers(values: Floats) -> tuple[Ints, Fraction] | None:
    """Writes decimals as integers times one unit; `None` if they have too many digits."""
    # A float stands for the shortest decimal that rounds to it: 0.1 is a tenth.
    for decimals in range(_MOST_DECIMALS + 1):
        scale = 10.0**decimals
        with np.errstate(over="ignore"):
            rounded = np.rint(values * scale)
        if rounded.size and float(rounded.max()) >= _EXACT_INTEGERS:
            return None
        # Division rounds correctly, so equality holds exactly for floats nearest to a decimal.
        if np.array_equal(rounded / scale, values):
            integers = rounded.astype(np.int64)
            divisor = max(math.gcd(*integers.tolist()), 1)
            return integers // divisor, Fraction(divisor, 10**decimals)
    return None


def to_big_integers(values: Floats) -> tuple[Ints, Fraction]:
    """Writes floats at their exact binary value as Python integers times one unit."""
    pairs = [float(value).as_integer_ratio() for value in values]
    # All denominators are powers of two, so the largest is the common one.
    common = max((denominator for _, denominator in pairs), default=1)
    integers = np.empty(len(pairs), dtype=object)
    integers[:] = [numerator * (common // denominator) for numerator, denominator in pairs]
    return integers, Fraction(1, common)


def decimal(value: float | Fraction) -> Fraction:
    """Returns the shortest decimal that rounds to a float; fractions stay as they are."""
    return value if isinstance(value, Fraction) else Fraction(repr(float(value)))


def search(rising: Ints, values: Any, side: Literal["left", "right"]) -> Ints:
    """Calls `np.searchsorted`; the result is an `int64` array for Python integers too."""
    return np.asarray(np.searchsorted(rising, values, side=side), dtype=np.int64)


def expand(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Returns all numbers from low to high of each row: the row of each, and the number."""
    lengths = np.maximum(high - low + 1, 0)
    owner = np.repeat(np.arange(low.size), lengths)
    offsets = np.cumsum(lengths) - lengths
    return owner, np.arange(owner.size) - offsets[owner] + low[owner]


def prefix_sums(values: Ints) -> Ints:
    """Returns the sums of the first 0, 1, ..., n of n values."""
    sums = np.zeros(values.size + 1, dtype=values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums
