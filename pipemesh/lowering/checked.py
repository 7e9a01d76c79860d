"""Argument checks for operations, chosen by the annotations of their parameters."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipemeshError, ShapeError
from pipemesh.lowering.arguments import (
    as_dim,
    as_dtype,
    as_shape,
    as_tensor,
    as_tensors,
    as_whole,
    described,
    dim_name,
    dim_names,
)
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Shape
from pipemesh.randomness.scope import scopes

# Exceptions that TensorFlow and Python raise for arguments that passed all checks.
_RAW = (
    TypeError,
    ValueError,
    OverflowError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
)

# The dtypes that operations accept, for argument `x` or for the named argument. Operations in no
# list accept all dtypes.
_FLOATING = (
    "ceil cos erf exp floor gelu is_finite is_nan log log1p reciprocal rsqrt sigmoid silu sin "
    "softplus sqrt tanh reduce_logsumexp softmax log_softmax dropout conv1d conv2d conv3d "
    "conv1d.filters conv2d.filters conv3d.filters random_uniform.dtype random_normal.dtype"
)
_NUMBERS = (
    "abs negative relu round sign square reduce_sum reduce_max reduce_min top_k cumsum "
    "einsum.operands "
    "add.a divide.a floor_divide.a floor_mod.a greater.a greater_equal.a less.a less_equal.a "
    "maximum.a minimum.a multiply.a power.a squared_difference.a subtract.a "
    "add.b divide.b floor_divide.b floor_mod.b greater.b greater_equal.b less.b less_equal.b "
    "maximum.b minimum.b multiply.b power.b squared_difference.b subtract.b"
)
_INTEGERS = "one_hot.indices gather.indices"
_BOOLEANS = (
    "logical_not reduce_all reduce_any where.condition logical_and.a logical_or.a logical_xor.a "
    "logical_and.b logical_or.b logical_xor.b"
)
_KINDS: dict[str, tuple[str, Callable[[tf.DType], bool]]] = {}
for _names, _kind, _fits in (
    (_FLOATING, "floating numbers", lambda d: d.is_floating),
    (_NUMBERS, "numbers", lambda d: d.is_floating or d.is_integer),
    (_INTEGERS, "integers", lambda d: d.is_integer),
    (_BOOLEANS, "booleans", lambda d: d.is_bool),
):
    _KINDS.update({name: (_kind, _fits) for name in _names.split()})


def _check_kind(op: str, parameter: str, value: Any) -> None:
    key = op if parameter == "x" else f"{op}.{parameter}"
    if isinstance(value, list):
        for part in value:
            _check_kind(op, parameter, part)
    if key not in _KINDS or not isinstance(value, Tensor | tf.DType):
        return
    kind, fits = _KINDS[key]
    if not fits(value.dtype if isinstance(value, Tensor) else value):
        raise ShapeError(
            f"ops.{op}: {parameter} is {value!r}, but has to be of {kind}; ops.cast makes them"
        )


def _as_flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ShapeError(f"{what} is {described(value)}; give True or False")
    return bool(value)


def _as_number(value: Any, what: str) -> Any:
    if not isinstance(value, numbers.Real | np.bool_):
        raise ShapeError(f"{what} is {described(value)}; give a number")
    return value


def _as_seed(value: Any, what: str) -> tf.Tensor:
    try:
        found = tf.convert_to_tensor(value)
    except _RAW:
        found = tf.constant("")
    # The layer function of a SimdPipeline may get one seed per layer.
    in_layer = bool(scopes.slicewise) and scopes.slicewise[-1].draw is not None
    fits = any(found.shape.is_compatible_with(s) for s in ([2], [None, 2])[: 1 + in_layer])
    if not found.dtype.is_integer or not fits:
        raise ShapeError(f"{what} is {described(value)}; give two integers, as in [1, 2]")
    return value


def _as_lowering(value: Any, what: str) -> Lowering:
    if not isinstance(value, Lowering):
        raise ShapeError(
            f"{what} is {described(value)}; give a lowering, such as "
            "PlacementLowering(mesh, rules, devices), and then the rest"
        )
    return value


def _as_array(value: Any, what: str) -> tf.Tensor:
    if isinstance(value, Tensor):
        raise ShapeError(
            f"{what} is {value!r}, which has named dims already; use it, or ops.rename or "
            "ops.reshape it"
        )
    try:
        found = tf.convert_to_tensor(value)
    except _RAW:
        found = tf.constant("")
    if value is None or found.dtype == tf.string:
        raise ShapeError(f"{what} is {described(value)}; give an array or tensor of numbers")
    as_dtype(found.dtype, what)
    return found


def _as_mapping(value: Any, known: Sequence[Tensor], what: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ShapeError(f"{what} is {described(value)}; give a dict of names by names")
    return {dim_name(k, known, what): dim_name(v, known, what) for k, v in value.items()}


def _as_steps(value: Any, known: Sequence[Tensor], what: str) -> Any:
    if not isinstance(value, Mapping):
        return as_whole(value, what)
    return {dim_name(k, known, what): as_whole(v, what) for k, v in value.items()}


def _as_sizes(value: Any, what: str) -> Any:
    if isinstance(value, list | tuple):
        return [as_whole(part, what) for part in value]
    return as_whole(value, what)


def _noise_dims(value: Any, known: Sequence[Tensor]) -> Shape | None:
    if value is None or isinstance(value, Shape):
        return value
    return known[0].shape.select(*dim_names(value, known, "noise_dims"))


def _unchanged(value: Any, known: Sequence[Tensor], what: str) -> Any:
    return value


# Maps a parameter's annotation to its check, a function of the value, the call's tensors and the
# parameter's name.
COERCERS: dict[str, Callable[[Any, Sequence[Tensor], str], Any]] = {
    "Tensor": lambda value, known, what: as_tensor(value, what),
    "Sequence[Tensor]": lambda value, known, what: as_tensors(value, what),
    "Operand": _unchanged,
    "Lowering": lambda value, known, what: _as_lowering(value, what),
    "Any": lambda value, known, what: _as_array(value, what),
    "Dim": lambda value, known, what: as_dim(value, what),
    "Shape": lambda value, known, what: as_shape(value, what),
    "Shape | str": lambda value, known, what: as_shape(value, what),
    "Shape | None": lambda value, known, what: _noise_dims(value, known),
    "str": dim_name,
    "Sequence[str]": dim_names,
    "Dims": lambda value, known, what: None if value is None else dim_names(value, known, what),
    "Mapping[str, str]": _as_mapping,
    "Steps": _as_steps,
    "int": lambda value, known, what: as_whole(value, what),
    "int | Sequence[int]": lambda value, known, what: _as_sizes(value, what),
    "bool": lambda value, known, what: _as_flag(value, what),
    "float": lambda value, known, what: _as_number(value, what),
    "tf.DType": lambda value, known, what: as_dtype(value, what),
    "tf.Tensor": lambda value, known, what: _as_seed(value, what),
    # The operation itself checks that the value is one of a few words.
    "Padding": _unchanged,
}


def _form(name: str, signature: inspect.Signature) -> str:
    """Returns the call form of an operation, such as `ops.slice(x, dim, begin, size)`."""
    parts = [
        p.name if p.default is p.empty and p.kind is not p.KEYWORD_ONLY else f"{p.name}=..."
        for p in signature.parameters.values()
    ]
    return f"ops.{name}({', '.join(parts)})"


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an operation so that `COERCERS` checks each argument by its parameter's annotation."""
    signature = inspect.signature(function)
    name = function.__name__
    coercers = {
        p.name: COERCERS.get(str(p.annotation), _unchanged) for p in signature.parameters.values()
    }

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ShapeError(f"ops.{name}: {error}; write {_form(name, signature)}") from None
        known: list[Tensor] = []
        for parameter, value in bound.arguments.items():
            what = f"ops.{name}: {parameter}"
            bound.arguments[parameter] = value = coercers[parameter](value, known, what)
            _check_kind(name, parameter, value)
            parts = value if isinstance(value, list) else [value]
            known += [part for part in parts if isinstance(part, Tensor)]
        try:
            return function(*bound.args, **bound.kwargs)
        except PipemeshError:
            raise
        except _RAW as error:
            given = ", ".join(f"{k}={described(v)}" for k, v in bound.arguments.items())
            lines = str(getattr(error, "message", error)).strip().splitlines()
            raise ShapeError(
                f"ops.{name}({given}) is not possible: {lines[0] if lines else error!r}"
            ) from error

    return tf.autograph.experimental.do_not_convert(call)
