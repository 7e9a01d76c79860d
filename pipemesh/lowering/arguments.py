"""The accepted forms of tensors, dims, numbers and dtypes.

Every operation accepts dims in the same forms. An error for a wrong argument names the given value
and the valid ones. `checked` passes the arguments of all operations through this module.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.given import check_real
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.lowering.variable import Variable
from pipemesh.mesh import Dim, Shape
from pipemesh.mesh.checks import is_name, whole_number

_SHOWN = 60
NAMES = "a name, 'name:size', a Dim, or a list of these"


def described(value: Any) -> str:
    """Returns a short description of a value for an error."""
    if isinstance(value, Tensor):
        return repr(value)
    if isinstance(value, Variable):
        return f"the variable {value.name!r}"
    if isinstance(value, tf.Tensor | tf.Variable):
        return f"a {value.dtype.name} tensor of TensorFlow of sizes {value.shape}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, str):
        return f"the text {value!r}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def as_tensor(value: Any, what: str = "it") -> Tensor:
    """Returns the tensor with named dims, or raises a ShapeError with the way to make one."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Variable):
        way = "take its values: variable.tensor(lowering)"
    elif isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        way = "give one tensor, not several"
    elif value is None or isinstance(value, str | Shape | Dim | Lowering):
        way = "give a tensor with named dims"
    else:
        way = "name its dims: ops.import_tensor(lowering, value, 'dim:size')"
    raise ShapeError(f"{what} is {described(value)}; {way}")


def as_tensors(value: Any, what: str = "it") -> list[Tensor]:
    """Returns a list of tensors with named dims, or raises a ShapeError."""
    if isinstance(value, Tensor):
        raise ShapeError(f"{what} is one tensor, {value!r}; give a list, as in [x]")
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping | tf.Tensor | np.ndarray):
        raise ShapeError(f"{what} is {described(value)}; give a list of tensors with named dims")
    return [as_tensor(part, f"{what}[{i}]") for i, part in enumerate(value)]


def as_dim(value: Any, what: str = "dim") -> Dim:
    """Returns a sized dim from a `Dim`, `"name:size"` or a list of one."""
    if isinstance(value, Shape | list | tuple) and len(value) == 1:
        (value,) = value
    if isinstance(value, Dim):
        return value
    if is_name(value):
        raise ShapeError(
            f"{what} is {value!r}, which has no size; write {f'{value}:8'!r}, or Dim({value!r}, 8)"
        )
    if not isinstance(value, str):
        raise ShapeError(
            f"{what} is {described(value)}; give a dim with its size: 'name:8', or Dim('name', 8)"
        )
    return Dim.from_text(value)


def as_shape(value: Any, what: str = "shape") -> Shape:
    """Returns a shape from a `Shape`, `Dim`, a list of dims, or a text such as `"batch:4;io:3"`."""
    if isinstance(value, Shape):
        return value
    if isinstance(value, Dim):
        return Shape((value,))
    if isinstance(value, str):
        return Shape.from_text(value)
    if isinstance(value, list | tuple) and not any(whole_number(p) is not None for p in value):
        return Shape(tuple(as_dim(part, f"{what}[{i}]") for i, part in enumerate(value)))
    raise ShapeError(
        f"{what} is {described(value)}; name the dims: 'batch:4;io:3', or a list of Dims"
    )


def dim_names(value: Any, known: Sequence[Tensor] = (), what: str = "dims") -> tuple[str, ...]:
    """Returns dim names from a name, `"name:size"`, a text with `;`, a `Dim`, `Shape` or list."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(";")] if value.strip() else []
        return tuple(_name_of_text(part, known, what) for part in parts)
    if isinstance(value, Dim):
        for tensor in known:
            if value.name in tensor.shape.names and tensor.shape[value.name] != value:
                raise ShapeError(
                    f"{what}: dim {value.name!r} has size {value.size}, but in '{tensor.shape}' "
                    f"{tensor.shape[value.name].size}; give its name alone, or this size"
                )
        return (value.name,)
    allowed = list | tuple | Shape | set | frozenset | type({}.keys()) | type({}.values())
    if not isinstance(value, allowed):
        raise ShapeError(f"{what} is {described(value)}; give {NAMES}")
    return tuple(name for part in value for name in dim_names(part, known, what))


def _name_of_text(text: str, known: Sequence[Tensor], what: str) -> str:
    if is_name(text):
        return text
    if ":" in text:
        return dim_names(Dim.from_text(text), known, what)[0]
    raise ShapeError(
        f"{what}: {text!r} is no name of a dim; give {NAMES} (letters, digits and underscores; "
        "several are joined by ';')"
    )


def dim_name(value: Any, known: Sequence[Tensor] = (), what: str = "dim") -> str:
    """Returns the name of one dim, given in a form that `dim_names` accepts."""
    names = dim_names(value, known, what)
    if len(names) != 1:
        raise ShapeError(f"{what} is {described(value)}; give one dim: its name, or a Dim")
    return names[0]


def as_whole(value: Any, what: str) -> int:
    """Returns the value as an int, or raises a ShapeError if it is not whole."""
    found = whole_number(value)
    if found is None:
        raise ShapeError(f"{what} is {described(value)}; give a whole number")
    return found


def as_dtype(value: Any, what: str = "dtype") -> tf.DType:
    """Returns a dtype of real numbers or booleans, or raises a ShapeError."""
    try:
        found = tf.as_dtype(value)
    except TypeError:
        found = tf.string
    check_real(found, what)
    numeric = found.is_floating or found.is_integer or found.is_bool
    if value is None or not numeric:
        raise ShapeError(
            f"{what} is {described(value)}; give a dtype of numbers or booleans, for example "
            "tf.float32"
        )
    return found


def check_operands(name: str, operands: Sequence[Any]) -> None:
    """Checks for tensors of one dtype and numbers of that dtype; ignores arrays."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    for operand in operands:
        if operand is None or isinstance(operand, str | bytes | dict | Variable | Shape | Dim):
            as_tensor(operand, f"ops.{name}: an operand")
    if not tensors:
        given = ", ".join(map(described, operands))
        raise ShapeError(
            f"ops.{name} of {given}: they have no named dims; one operand at least is made by "
            "ops.import_tensor(lowering, value, 'dim:size')"
        )
    dtype = tensors[0].dtype
    for operand in operands:
        named = isinstance(operand, Tensor | tf.Tensor | tf.Variable)
        if named and tf.as_dtype(operand.dtype) != dtype:
            raise ShapeError(
                f"ops.{name} of {tensors[0]!r} and {described(operand)}: the operands are of "
                f"dtypes {dtype.name}, {tf.as_dtype(operand.dtype).name}; ops.cast them to one"
            )
        if not named and np.ndim(operand) == 0 and not _is_number_of(operand, dtype):
            raise ShapeError(
                f"ops.{name} of {tensors[0]!r} and {described(operand)}, which is no {dtype.name}; "
                f"give a number of this dtype, or ops.cast(x, ...) the tensor"
            )


def _is_number_of(value: Any, dtype: tf.DType) -> bool:
    if dtype.is_bool or isinstance(value, bool | np.bool_):
        return dtype.is_bool and isinstance(value, bool | np.bool_)
    kinds = numbers.Integral if dtype.is_integer else numbers.Real
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    if not isinstance(value, kinds):
        return False
    return not dtype.is_integer or dtype.min <= value <= dtype.max
