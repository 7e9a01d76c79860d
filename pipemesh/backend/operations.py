"""Operations that every action needs, built with as little Python work as possible.

TensorFlow's wrappers convert, check and look up what is known here: they take two to three times as
long as the operation itself, and a schedule has thousands of them. None of these has a gradient;
the pipeline attaches one to its results as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

Tensors = list[tf.Tensor]
# Of lists in which None may stand, or may not.
MaybeTensor = TypeVar("MaybeTensor", bound=tf.Tensor | None)
_NO_GRADIENT = "PipemeshNoGradient"


@tf.RegisterGradient(_NO_GRADIENT)
def _no_gradient(op: tf.Operation, *_: tf.Tensor) -> list[None]:
    return [None] * len(op.inputs)


def pin(tensors: Tensors) -> Tensors:
    """The tensors, by one operation that control dependencies can be hung on.

    A dependency on a function call is lost when the call is inlined. An identity would do, but
    the graph optimizer moves identities across splits and concats together with their control
    dependencies, which builds cycles; it leaves these operations alone.

    Args:
        tensors: of one graph or of graphs outside of it.

    Returns:
        The same values, with static shapes as far as they are known.
    """
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


def pin_present(tensors: Sequence[MaybeTensor]) -> list[MaybeTensor]:
    """Pins those that are not None."""
    pinned = iter(pin([t for t in tensors if t is not None]))
    return cast("list[MaybeTensor]", [None if t is None else next(pinned) for t in tensors])


def pin_each(tensors: list[MaybeTensor], devices: str | Sequence[str]) -> list[MaybeTensor]:
    """Pins those that are not None, each on its device, or all on one."""
    each = [devices] * len(tensors) if isinstance(devices, str) else devices
    result = list(tensors)
    for device in dict.fromkeys(each):
        chosen = [i for i, own in enumerate(each) if own == device]
        with tf.device(device):
            pinned = pin_present([tensors[i] for i in chosen])
        for i, tensor in zip(chosen, pinned, strict=True):
            result[i] = tensor
    return result


def anchor(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor, by an operation that stays on its device.

    The graph optimizer passes by one that hands on to a single user, pins too. This one could be
    given another value, so it does not.
    """
    attributes = {
        "dtype": _attribute(type=tensor.dtype.as_datatype_enum),
        "shape": _attribute(shape=tensor.shape.as_proto()),
    }
    return _make("PlaceholderWithDefault", [tensor], [tensor.dtype], attributes)[0]


def switch(tensor: tf.Tensor, predicate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A tensor that is there on one of two sides alone: where the predicate is false, and true."""
    attributes = {"T": _attribute(type=tensor.dtype.as_datatype_enum)}
    other, taken = _make("Switch", [tensor, predicate], [tensor.dtype] * 2, attributes)
    return other, taken


def switch_to(tensor: tf.Tensor, number: tf.Tensor, count: int) -> Tensors:
    """A tensor that is there on one of some sides alone: on that of a number, an int32 scalar."""
    # What TensorFlow makes of `tf.switch_case`.
    attributes = {
        "T": _attribute(type=tensor.dtype.as_datatype_enum),
        "num_outs": _attribute(i=count),
    }
    return _make("_SwitchN", [tensor, number], [tensor.dtype] * count, attributes)


def merge(tensors: Tensors) -> tf.Tensor:
    """That one of some tensors of a dtype which is there when the graph runs."""
    dtype = tensors[0].dtype
    attributes = {
        "T": _attribute(type=dtype.as_datatype_enum),
        "N": _attribute(i=len(tensors)),
    }
    return _make("Merge", tensors, [dtype, tf.int32], attributes)[0]


def table(rows: np.ndarray) -> tf.Tensor:
    """A constant; TensorFlow's own wrapper takes booleans one by one.

    Args:
        rows: of any shape, of a dtype that TensorFlow has.
    """
    dtype, value = tf.as_dtype(rows.dtype), _attribute()
    value.tensor.dtype = dtype.as_datatype_enum
    value.tensor.tensor_shape.CopyFrom(tf.TensorShape(rows.shape).as_proto())
    value.tensor.tensor_content = rows.tobytes()
    attributes = {"value": value, "dtype": _attribute(type=dtype.as_datatype_enum)}
    return _make("Const", [], [dtype], attributes)[0]


def list_get(handle: tf.Tensor, index: tf.Tensor, shape: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """An element of one of TensorFlow's list values.

    Args:
        handle: the list.
        index: int32 scalar.
        shape: of the element, int32.
        dtype: of the element.
    """
    attributes = {"element_dtype": _attribute(type=dtype.as_datatype_enum)}
    return _make("TensorListGetItem", [handle, index, shape], [dtype], attributes)[0]


def list_set(handle: tf.Tensor, index: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The list that has another element in a place; arguments as those of `list_get`."""
    attributes = {"element_dtype": _attribute(type=value.dtype.as_datatype_enum)}
    return _make("TensorListSetItem", [handle, index, value], [tf.variant], attributes)[0]


class Call:
    """Calls a concrete function that has no gradient.

    Args:
        function: the function.
        taken: the positions of those that it takes among the tensors that it is called with.
        has_effects: whether it checks or tells something.
    """

    def __init__(self, function: Any, taken: Sequence[int], has_effects: bool = False) -> None:
        self._function = function
        self._has_effects = has_effects
        self._taken = taken
        self._dtypes = [t.dtype for t in function.outputs]
        self._shapes = [t.shape for t in function.outputs]
        self._captures = function.captured_inputs
        self._attributes = {
            "Tin": _types([t.dtype for t in function.inputs]),
            "Tout": _types(self._dtypes),
            "f": _attribute(func=tf.compat.v1.NameAttrList(name=function.name)),
            # A persistent tape asks for it where an eager call has recorded the pipeline.
            "_gradient_op_type": _attribute(s=_NO_GRADIENT.encode()),
        }
        self._known_to: tf.Graph | None = None

    def __call__(self, arguments: Tensors) -> Tensors:
        """The results for the arguments that it takes; the function's captures are added."""
        if not self._dtypes:
            return []
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._known_to:
            self._function.add_to_graph(graph)
            self._known_to = graph
        tensors = [*(arguments[i] for i in self._taken), *self._captures]
        # A TF1 session computes beforehand what depends on constants alone and has no state. In
        # functions of TF2 what has state would wait for all others with state, across devices.
        orders_state = getattr(graph, "_add_control_dependencies", False)
        has_state = self._has_effects and not orders_state
        kind = "StatefulPartitionedCall" if has_state else "PartitionedCall"
        results = _make(kind, tensors, self._dtypes, self._attributes)
        for tensor, shape in zip(results, self._shapes, strict=True):
            tensor.set_shape(shape)
        if not self._has_effects:
            return results
        # A TF1 session inlines no call that has effects and nothing waits for; and errors inside of
        # a call that is not inlined are lost among those of the devices that wait.
        # TensorFlow drops an order between two operations that also hand on data; hence a third.
        with tf.control_dependencies([results[0].op]):
            done = tf.no_op()
        with tf.control_dependencies([done]):
            return pin(results)


def mark(operation: tf.Operation, name: str) -> None:
    """Gives an operation an attribute of ours, which is in its graph's definition too.

    Args:
        operation: in a graph.
        name: of the attribute, which begins with an underscore.
    """
    operation._set_attr(name, _attribute(b=True))


def is_marked(operation: tf.Operation, name: str) -> bool:
    """Whether `mark` gave an operation an attribute."""
    try:
        return operation.get_attr(name)
    except ValueError:
        return False


def wait_for(operation: tf.Operation, other: tf.Operation) -> None:
    """Has an operation that is there already wait for another one of its graph."""
    operation._add_control_input(other)


def operation_number(operation: tf.Operation) -> int:
    """The number of an operation in its graph, in the order of their making."""
    return operation._id


def next_operation_number(graph: tf.Graph) -> int:
    """The number of the next operation; two nodes of a graph, its source and sink, have none."""
    return graph.version + 2


def _make(kind: str, tensors: Tensors, dtypes: list[tf.DType], attributes: Any) -> Tensors:
    # The public `create_op` does the same after checks of its own, and says that it is deprecated.
    graph: Any = tf.compat.v1.get_default_graph()
    # No name begins with an underscore, with which TensorFlow's inner operations do.
    name = kind.lstrip("_")
    return graph._create_op_internal(kind, tensors, dtypes, None, name, attributes).outputs


def _types(dtypes: list[tf.DType]) -> Any:
    types = [dtype.as_datatype_enum for dtype in dtypes]
    return _attribute(list=tf.compat.v1.AttrValue.ListValue(type=types))


def _attribute(**value: Any) -> Any:
    return tf.compat.v1.AttrValue(**value)


# By it the graph optimizer knows the sums that it has merged, and leaves them alone from then on.
MERGED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors from the first to the last, two at a time.

    `tf.add_n` of three and more begins with any whose memory it can take for the sum, so that the
    last bit depends on which of them has been received, and from where; and the graph optimizer
    makes one such operation of all additions of a device that follow each other. Of two, the sum
    is the same in either order; and these are not merged.

    Args:
        tensors: of one shape and dtype, at least one.

    Returns:
        The sum; a single tensor as it is.

    Example:
        >>> float(sum_in_order([tf.constant(1e8), tf.constant(-1e8), tf.constant(1.0)]))
        1.0
    """
    total = tensors[0]
    for tensor in tensors[1:]:
        total = tf.add_n([total, tensor])
        if tf.is_symbolic_tensor(total):
            mark(total.op, MERGED)
    return total
