"""The accepted forms of arguments, checked for every registered operation.

Every operation accepts dims in the same forms. An error for a wrong argument names the given value
and the valid ones.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipemeshError, ShapeError
from pipemesh.lowering.costs import operation
from pipemesh.lowering.lowering import Lowering, check_real
from pipemesh.lowering.registry import OPS, Op
from pipemesh.lowering.tensor import Tensor
from pipemesh.lowering.variable import Variable
from pipemesh.mesh import Dim, Shape
from pipemesh.mesh.checks import is_name, whole_number
from pipemesh.randomness.scope import scopes

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
    number = whole_number(value)
    if number is None:
        raise ShapeError(f"{what} is {described(value)}; give a whole number")
    return number


def as_dtype(value: Any, what: str = "dtype") -> tf.DType:
    """Returns a dtype of real numbers or booleans, or raises a ShapeError."""
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = tf.string
    check_real(dtype, what)
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_bool
    if value is None or not numeric:
        raise ShapeError(
            f"{what} is {described(value)}; give a dtype of numbers or booleans, for example "
            "tf.float32"
        )
    return dtype


def check_operands(name: str, operands: Sequence[Any]) -> None:
    """Checks for tensors of one dtype and numbers of that dtype; ignores arrays."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    for operand in operands:
        if operand is None or isinstance(operand, str | bytes | dict | Variable | Shape | Dim):
            as_tensor(operand, f"ops.{name}: an operand")
    if not tensors:
        texts = ", ".join(map(described, operands))
        raise ShapeError(
            f"ops.{name} of {texts}: they have no named dims; one operand at least is made by "
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
    "softplus sqrt tanh reduce_logsumexp softmax log_softmax dropout avg_pool conv1d conv2d conv3d "
    "conv_transpose conv1d.filters conv2d.filters conv3d.filters conv_transpose.filters "
    "random_uniform.dtype random_normal.dtype"
)
_NUMBERS = (
    "abs negative relu round sign square reduce_sum reduce_max reduce_min top_k cumsum max_pool "
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
        seed = tf.convert_to_tensor(value)
    except _RAW:
        seed = tf.constant("")
    # The layer function of a SimdPipeline may get one seed per layer.
    in_layer = bool(scopes.slicewise) and scopes.slicewise[-1].draw is not None
    fits = any(seed.shape.is_compatible_with(s) for s in ([2], [None, 2])[: 1 + in_layer])
    if not seed.dtype.is_integer or not fits:
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
        array = tf.convert_to_tensor(value)
    except _RAW:
        array = tf.constant("")
    if value is None or array.dtype == tf.string:
        raise ShapeError(f"{what} is {described(value)}; give an array or tensor of numbers")
    as_dtype(array.dtype, what)
    return array


def _as_mapping(value: Any, known: Sequence[Tensor], what: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ShapeError(f"{what} is {described(value)}; give a dict of names by names")
    return {dim_name(k, known, what): dim_name(v, known, what) for k, v in value.items()}


def _as_steps(value: Any, known: Sequence[Tensor], what: str) -> Any:
    if not isinstance(value, Mapping):
        return as_whole(value, what)
    return _as_counts(value, known, what)


def _as_counts(value: Any, known: Sequence[Tensor], what: str) -> dict[str, int]:
    if not isinstance(value, Mapping) or not value:
        raise ShapeError(
            f"{what} is {described(value)}; give numbers by names, as in {{'rows': 2}}"
        )
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
    "Mapping[str, int]": _as_counts,
    "Steps": _as_steps,
    "Steps | None": lambda value, *more: None if value is None else _as_steps(value, *more),
    "int": lambda value, known, what: as_whole(value, what),
    "int | Sequence[int]": lambda value, known, what: _as_sizes(value, what),
    "bool": lambda value, known, what: _as_flag(value, what),
    "float": lambda value, known, what: _as_number(value, what),
    "tf.DType": lambda value, known, what: as_dtype(value, what),
    "tf.Tensor": lambda value, known, what: _as_seed(value, what),
    # The operation itself checks that the value is one of a few words.
    "Padding": _unchanged,
}


# Groups of operations whose functions of slices are a flop for each element. Others move elements,
# or count their flops themselves.
_ARITHMETIC = ("elementwise", "reduction", "softmax", "order", "random")


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
            with operation(name, known, OPS[name].group in _ARITHMETIC):
                result = function(*bound.args, **bound.kwargs)
                parts = result if isinstance(result, tuple) else (result,)
                known += [part for part in parts if isinstance(part, Tensor)]
            return result
        except PipemeshError:
            raise
        except _RAW as error:
            arguments = ", ".join(f"{k}={described(v)}" for k, v in bound.arguments.items())
            lines = str(getattr(error, "message", error)).strip().splitlines()
            raise ShapeError(
                f"ops.{name}({arguments}) is not possible: {lines[0] if lines else error!r}"
            ) from error

    return tf.autograph.experimental.do_not_convert(call)


F = TypeVar("F", bound=Callable[..., Any])


def register(group: str, *communicates: str, arguments: str = "") -> Callable[[F], F]:
    """Returns a decorator that registers a function as an operation and makes it `checked`.

    `arguments` extends the docstring, for operations that describe the same arguments.
    """

    # `communicates` does not list `vary`: every operation with several operands uses it.
    def add(function: F) -> F:
        name = function.__name__
        if name in OPS:
            raise ValueError(f"operation {name!r} is registered twice; give it another name")
        if arguments:
            function.__doc__ = f"{inspect.getdoc(function) or ''}\n\n{arguments}"
        careful = cast(F, checked(function))
        OPS[name] = Op(name, group, careful, communicates)
        return careful

    return add
