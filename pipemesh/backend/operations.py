"""Operations that every action needs, built with as little Python work as possible.

TensorFlow's wrappers convert, check and look up what is known here: they take two to three times as
long as the operation itself, and a schedule has thousands of them. None of these has a gradient;
the pipeline attaches one to its results as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

T = TypeVar("T")
Tensors = list[tf.Tensor]
# For lists with or without None.
MaybeTensor = TypeVar("MaybeTensor", bound=tf.Tensor | None)
_NO_GRADIENT = "PipemeshNoGradient"


@tf.RegisterGradient(_NO_GRADIENT)
def _no_gradient(op: tf.Operation, *_: tf.Tensor) -> list[None]:
    return [None] * len(op.inputs)


def pin(tensors: Tensors) -> Tensors:
    """Returns the tensors through one operation that can carry control dependencies."""
    # A dependency on a function call is lost when the call is inlined. An identity would do, but
    # the graph optimizer moves identities across splits and concats together with their control
    # dependencies, which builds cycles; it leaves these operations alone.
    if not tensors:
        return []
    dtypes = [t.dtype for t in tensors]
    if len(tensors) > 1:
        return _make("IdentityN", tensors, dtypes, {"T": _types(dtypes)})
    attributes = {
        "T": _attribute(type=dtypes[0].as_datatype_enum),
        "shape": _attribute(shape=tensors[0].shape.as_proto()),
    }
    return _make("EnsureShape", tensors, dtypes, attributes)


def on_each(devices: Sequence[str], function: Callable[..., T], *values: Sequence[Any]) -> list[T]:
    """Calls a function on each device, with the device's item of each of `values`."""
    results: list[T] = []
    for device, *args in zip(devices, *values, strict=True):
        with tf.device(device):
            results.append(function(*args))
    return results


def zeros(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns zeros that are no constant: those are made before the first step and kept, and equal
    ones are merged, so that to overwrite one would change all.
    """
    return tf.raw_ops.Empty(shape=spec.shape.as_list(), dtype=spec.dtype, init=True)


def add_rows(total: tf.Tensor, at: tf.Tensor, rows: tf.Tensor, device: str) -> tf.Tensor:
    """Adds rows to those at indices, on a device; in place on a CPU, so nothing else may read
    `total`, which is no constant.
    """
    with tf.device(device):
        # A scatter copies an argument of a function, such as a sum of a loop. `InplaceAdd` on GPUs
        # loses rows whose index occurs twice.
        if tf.DeviceSpec.from_string(device).device_type == "CPU":
            return tf.raw_ops.InplaceAdd(x=total, i=tf.cast(at, tf.int32), v=rows)
        return tf.tensor_scatter_nd_add(total, at[:, None], rows)


# The dtypes that every device can overwrite in place.
_OVERWRITTEN = (tf.bfloat16, tf.float16, tf.float32, tf.float64)


def overwritten(rows: tf.Tensor, at: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Replaces some rows, in place if the device can; valid if nothing else reads them."""
    if rows.dtype in _OVERWRITTEN:
        written = tf.raw_ops.InplaceUpdate(x=_bits(rows), i=at, v=_bits(values))
        return tf.bitcast(written, rows.dtype)
    return tf.tensor_scatter_nd_update(rows, at[:, None], values)


def copied(cache: tf.Tensor) -> tf.Tensor:
    """Returns a copy that `overwritten` may change."""
    return tf.bitcast(tf.raw_ops.DeepCopy(x=_bits(cache)), cache.dtype)


def _bits(x: tf.Tensor) -> tf.Tensor:
    """Returns the bits of bfloat16 as float16: kernels of GPUs refuse bfloat16 when they run."""
    return tf.bitcast(x, tf.float16) if x.dtype == tf.bfloat16 else x


def pin_present(tensors: Sequence[MaybeTensor]) -> list[MaybeTensor]:
    """Pins the tensors that are not None."""
    pinned = iter(pin([t for t in tensors if t is not None]))
    return cast("list[MaybeTensor]", [None if t is None else next(pinned) for t in tensors])


def pin_each(tensors: list[MaybeTensor], devices: str | Sequence[str]) -> list[MaybeTensor]:
    """Pins the tensors that are not None, each on its device, or all on one."""
    placements = [devices] * len(tensors) if isinstance(devices, str) else devices
    result = list(tensors)
    for device in dict.fromkeys(placements):
        chosen = [i for i, place in enumerate(placements) if place == device]
        with tf.device(device):
            pinned = pin_present([tensors[i] for i in chosen])
        for i, tensor in zip(chosen, pinned, strict=True):
            result[i] = tensor
    return result


def pin_behind(
    operations: Sequence[tf.Operation],
    tensors: list[MaybeTensor],
    devices: str | Sequence[str],
) -> list[MaybeTensor]:
    """Pins the tensors that are not None behind operations; without any, returns them as given."""
    if not operations:
        return tensors
    with tf.control_dependencies(operations):
        return pin_each(tensors, devices)


def anchor(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor through an operation that stays on its device."""
    # The graph optimizer removes an identity or a pin that has a single user. This operation could
    # be fed another value, so the optimizer keeps it.
    attributes = {
        "dtype": _attribute(type=tensor.dtype.as_datatype_enum),
        "shape": _attribute(shape=tensor.shape.as_proto()),
    }
    return _make("PlaceholderWithDefault", [tensor], [tensor.dtype], attributes)[0]


def switch(tensor: tf.Tensor, predicate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs of a `Switch`: alive if the predicate is false, and if it is true."""
    attributes = {"T": _attribute(type=tensor.dtype.as_datatype_enum)}
    other, taken = _make("Switch", [tensor, predicate], [tensor.dtype] * 2, attributes)
    return other, taken


def switch_to(tensor: tf.Tensor, number: tf.Tensor, count: int) -> Tensors:
    """Returns `count` outputs, of which only the one with an int32 number is alive."""
    # The lowered form of `tf.switch_case`.
    attributes = {
        "T": _attribute(type=tensor.dtype.as_datatype_enum),
        "num_outs": _attribute(i=count),
    }
    return _make("_SwitchN", [tensor, number], [tensor.dtype] * count, attributes)


def merge(tensors: Tensors) -> tf.Tensor:
    """Returns whichever of the tensors is alive when the graph runs."""
    dtype = tensors[0].dtype
    attributes = {
        "T": _attribute(type=dtype.as_datatype_enum),
        "N": _attribute(i=len(tensors)),
    }
    return _make("Merge", tensors, [dtype, tf.int32], attributes)[0]


def table(rows: np.ndarray) -> tf.Tensor:
    """Returns a constant of any shape and dtype."""
    # TensorFlow's own wrapper converts booleans one by one.
    dtype, value = tf.as_dtype(rows.dtype), _attribute()
    value.tensor.dtype = dtype.as_datatype_enum
    value.tensor.tensor_shape.CopyFrom(tf.TensorShape(rows.shape).as_proto())
    value.tensor.tensor_content = rows.tobytes()
    attributes = {"value": value, "dtype": _attribute(type=dtype.as_datatype_enum)}
    return _make("Const", [], [dtype], attributes)[0]


def list_get(handle: tf.Tensor, index: tf.Tensor, shape: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns an element of one of TensorFlow's list values, at an int32 index."""
    attributes = {"element_dtype": _attribute(type=dtype.as_datatype_enum)}
    return _make("TensorListGetItem", [handle, index, shape], [dtype], attributes)[0]


def list_set(handle: tf.Tensor, index: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns TensorFlow's list value with another element at an index."""
    attributes = {"element_dtype": _attribute(type=value.dtype.as_datatype_enum)}
    return _make("TensorListSetItem", [handle, index, value], [tf.variant], attributes)[0]


class Call:
    """A call of a concrete function that has no gradient."""

    # `has_effects` says whether the function checks or prints, `compiles` whether XLA compiles it.

    def __init__(self, function: Any, has_effects: bool = False, compiles: bool = False) -> None:
        self._function = function
        self._has_effects = has_effects
        self._dtypes = [t.dtype for t in function.outputs]
        self._shapes = [t.shape for t in function.outputs]
        self._captures = function.captured_inputs
        self._attributes = {
            "Tin": _types([t.dtype for t in function.inputs]),
            "Tout": _types(self._dtypes),
            "f": _attribute(func=tf.compat.v1.NameAttrList(name=function.name)),
            # A persistent tape asks for it if an eager call has recorded the pipeline.
            "_gradient_op_type": _attribute(s=_NO_GRADIENT.encode()),
            # A function with this attribute is not inlined.
            **({"_XlaMustCompile": _attribute(b=True)} if compiles else {}),
        }
        self._known_to: tf.Graph | None = None

    def __call__(self, arguments: Tensors) -> Tensors:
        """Returns the results for the arguments; the function's captures are added."""
        if not self._dtypes:
            return []
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._known_to:
            self._function.add_to_graph(graph)
            self._known_to = graph
        tensors = [*arguments, *self._captures]
        # A TF1 session folds stateless operations on constants before it runs. In functions of TF2
        # a stateful operation would wait for all others, across devices.
        orders_state = getattr(graph, "_add_control_dependencies", False)
        has_state = self._has_effects and not orders_state
        kind = "StatefulPartitionedCall" if has_state else "PartitionedCall"
        results = _make(kind, tensors, self._dtypes, self._attributes)
        for tensor, shape in zip(results, self._shapes, strict=True):
            tensor.set_shape(shape)
        if not self._has_effects:
            return results
        # A TF1 session does not inline a call with effects that nothing waits for. Errors inside a
        # call that is not inlined are lost among those of waiting devices.
        # TensorFlow drops a control edge between two operations that also have a data edge; hence a
        # third operation.
        with tf.control_dependencies([results[0].op]):
            done = tf.no_op()
        with tf.control_dependencies([done]):
            return pin(results)


# Marks of operations that join tensors, which are kept instead of their result; and of those that
# hand on tensors of earlier sequence slices, whose memory all later slices share.
JOINED, SHARED = "_pipemesh_joined", "_pipemesh_shared"
# Marks an operation that the graph optimizer may not bypass.
UNTOUCHED = "_grappler_do_not_remove"


def mark(operation: tf.Operation, name: str) -> None:
    """Sets an attribute `_...` on an operation and in its graph's definition."""
    operation._set_attr(name, _attribute(b=True))


def is_marked(operation: tf.Operation, name: str) -> bool:
    """Returns whether `mark` set an attribute on an operation."""
    try:
        return operation.get_attr(name)
    except ValueError:
        return False


def wait_for(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes an existing operation wait for another one of its graph."""
    operation._add_control_input(other)


def operation_number(operation: tf.Operation) -> int:
    """Returns the number of an operation in its graph, in order of creation."""
    return operation._id


def next_operation_number(graph: tf.Graph) -> int:
    """Returns the number of the next operation; the graph's source and sink have none."""
    return graph.version + 2


def _make(kind: str, tensors: Tensors, dtypes: list[tf.DType], attributes: Any) -> Tensors:
    # The public `create_op` does the same after additional checks, and warns that it is deprecated.
    graph: Any = tf.compat.v1.get_default_graph()
    # Names of nodes may not begin with an underscore, as types of internal operations do.
    name = kind.lstrip("_")
    return graph._create_op_internal(kind, tensors, dtypes, None, name, attributes).outputs


def _types(dtypes: list[tf.DType]) -> Any:
    types = [dtype.as_datatype_enum for dtype in dtypes]
    return _attribute(list=tf.compat.v1.AttrValue.ListValue(type=types))


def _attribute(**value: Any) -> Any:
    return tf.compat.v1.AttrValue(**value)


# The attribute of sums that the graph optimizer has merged; it does not merge them again.
MERGED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors from the first to the last, two at a time, with equal rounding everywhere."""
    # `tf.add_n` of three or more begins with any tensor whose memory it may reuse, so the last bit
    # would depend on which tensors were received, and from where. The graph optimizer merges
    # successive additions of a device into one such operation, except marked ones. Of two addends
    # the sum is the same in either order.
    total = tensors[0]
    for tensor in tensors[1:]:
        total = tf.add_n([total, tensor])
        if tf.is_symbolic_tensor(total):
            mark(total.op, MERGED)
    return total
