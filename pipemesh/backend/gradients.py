"""Custom gradients that stay on their devices, and the tapes that record them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

# TensorFlow has no public way to record or to list the active tapes; the version is pinned to 2.21.
from tensorflow.python.eager import backprop, context, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import cond_v2, control_flow_state, gen_functional_ops, gradients_util

from pipemesh.backend.graphs import surrounding_graphs
from pipemesh.backend.structure import is_differentiable, setting
from pipemesh.errors import GradientError


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Stops all outer tapes from recording inside."""
    return record.stop_recording()


@contextlib.contextmanager
def outside_graphs() -> Iterator[None]:
    """Enters eager mode, outside of the caller's graphs and tapes."""
    with record.stop_recording(), context.eager_mode():
        yield


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether a tape records computations with any of the tensors."""
    return record.should_record_backprop(list(tensors))


def is_recorded_twice(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns whether several tapes, or one persistent tape, may differentiate twice."""
    kinds = gradients_util.PossibleTapeGradientTypes(list(tensors))
    return kinds == gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER


def record_call(
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[..., list[Any]],
) -> None:
    """Records `backward` on all tapes that watch the inputs."""
    record.record_operation("pipemesh", list(outputs), list(inputs), backward)


def variables_read() -> Any:
    """Notes the trainable variables read inside, in an object with `watched_variables()`."""
    return record.VariableWatcher()


class _Tapes(threading.local):
    """The active tapes of a thread, the outermost first."""

    def __init__(self) -> None:
        self.active: list[tf.GradientTape] = []


_tapes = _Tapes()


def outermost_tape() -> tf.GradientTape | None:
    """Returns the outermost active `tf.GradientTape` of this thread, None without any."""
    return _tapes.active[0] if _tapes.active else None


def _noting(push: Any, pop: Any) -> tuple[Any, Any]:
    """Wraps the methods of a tape that begin and end recording."""

    def noting_push(self: tf.GradientTape) -> Any:
        _tapes.active.append(self)
        return push(self)

    def noting_pop(self: tf.GradientTape) -> Any:
        _tapes.active[:] = [tape for tape in _tapes.active if tape is not self]
        return pop(self)

    return noting_push, noting_pop


backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape = _noting(
    backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape
)


_F = TypeVar("_F", bound=Callable[..., Any])
# The attribute of a graph that holds its gradients, by name.
_STORE = "_pipemesh_gradients"
# Operations that check a tensor and its gradient.
_CHECKING = ("CheckNumerics", "CheckNumericsV2")
_local = threading.local()


def custom_gradient(function: _F) -> _F:
    """Decorates a function as `tf.custom_gradient` does, but frees everything with its graph."""
    # TensorFlow keeps what `tf.custom_gradient` registers in a graph for the life of the process,
    # and with it everything that the gradient uses: the whole graph, once for each trace of a
    # function.
    decorated = tf.custom_gradient(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if tf.executing_eagerly():
            return decorated(*args)
        outside, _local.registered = getattr(_local, "registered", None), []
        try:
            results = decorated(*args)
            _hand_over(_local.registered, tf.compat.v1.get_default_graph())
        finally:
            _local.registered = outside
        return results

    return cast("_F", call)


@contextlib.contextmanager
def unchecked_gradients() -> Iterator[None]:
    """Makes `tf.debugging.check_numerics` ignore gradients computed inside."""
    # A scaled loss may overflow; the pipeline then checks all gradients together.
    for name in _CHECKING:
        entry = _registry()[name]
        if not hasattr(entry["type"], "__wrapped__"):
            entry["type"] = _unless_unchecked(entry["type"])
    previous, _local.is_unchecked = getattr(_local, "is_unchecked", False), True
    try:
        yield
    finally:
        _local.is_unchecked = previous


def _unless_unchecked(gradient: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def call(operation: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
        if getattr(_local, "is_unchecked", False):
            return grad
        return gradient(operation, grad)

    return call


class _Registry(dict[str, Any]):
    """Gradients by name; notes those of each thread, since several build graphs at once."""

    def __setitem__(self, name: str, entry: Any) -> None:
        super().__setitem__(name, entry)
        registered = getattr(_local, "registered", None)
        if registered is not None:
            registered.append(name)


ops.gradient_registry._registry = _Registry(ops.gradient_registry._registry)


def _registry() -> dict[str, Any]:
    return ops.gradient_registry._registry


def _hand_over(names: list[str], graph: tf.Graph) -> None:
    """Moves registered gradients into a graph, which keeps them as long as it lives."""
    registry = _registry()
    kept: dict[str, Any] = getattr(graph, _STORE, {})
    setattr(graph, _STORE, kept)
    owner = weakref.ref(graph)
    for name in names:
        # The graph of an inner function may be gone, and its gradients with it.
        if name not in registry or getattr(registry[name]["type"], _STORE, False):
            continue
        kept[name] = registry[name]["type"]

        def look_up(operation: tf.Operation, *grads: Any, name: str = name) -> Any:
            alive = owner()
            if alive is None:
                raise LookupError(f"the graph that has the gradient {name!r} is gone")
            return getattr(alive, _STORE)[name](operation, *grads)

        setattr(look_up, _STORE, True)
        registry[name]["type"] = look_up
        weakref.finalize(graph, registry.pop, name, None).atexit = False


Grads = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Sources:
    """Tensors on one device that gradients flow to."""

    # Of any dtype; only floating and complex ones get a gradient.
    tensors: Sequence[tf.Tensor]
    device: str
    # Takes their gradients when they are asked for, and returns those to pass on.
    checked: Callable[[Grads], Grads] | None = None


def with_gradient(
    outputs: Sequence[tf.Tensor],
    device: str,
    sources: Sequence[Sources],
    backward: Callable[[Grads], list[Grads]],
) -> list[tf.Tensor]:
    """Returns `outputs` (without a gradient, on `device`), through which gradients flow to all
    groups of `sources` at once: `backward` returns those of each group.
    """
    # `tf.custom_gradient` passes everything that it differentiates through one operation, which
    # would copy the weights of all stages to one device. Here each group of sources has an
    # operation on its device that passes a scalar on; only these scalars meet. When the gradient
    # arrives at the outputs, `backward` computes all gradients, and each group takes its own when
    # autodiff reaches its scalar.
    computed: dict[int, Grads] = {}
    anchors = [_anchor(number, group, computed) for number, group in enumerate(sources)]
    floating = [i for i, t in enumerate(outputs) if is_differentiable(t)]

    @custom_gradient
    def attach(*tensors: tf.Tensor) -> Any:
        attached = [tf.identity(t) for t in tensors[: len(floating)]]

        def grad(*attached_grads: tf.Tensor) -> Grads:
            with without_colocation():
                output_grads: Grads = [None] * len(outputs)
                for i, value in zip(floating, attached_grads, strict=True):
                    output_grads[i] = value
                computed.update(enumerate(backward(output_grads)))
                return [None] * len(floating) + [tf.zeros([]) for _ in anchors]

        return attached, grad

    result = list(outputs)
    if floating:
        with tf.device(device):
            attached = attach(*(outputs[i] for i in floating), *anchors)
        for i, value in zip(floating, attached, strict=True):
            result[i] = value
    return result


def without_colocation() -> contextlib.AbstractContextManager[Any]:
    """Lets `tf.device` alone place operations inside."""
    # Autodiff may ask for all operations to be colocated with the differentiated one.
    return tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True)


def _anchor(number: int, group: Sources, computed: dict[int, Grads]) -> tf.Tensor:
    """Returns a scalar whose gradient is that of all floating tensors of the group."""
    floating = [i for i, t in enumerate(group.tensors) if is_differentiable(t)]

    @custom_gradient
    def anchor(*tensors: tf.Tensor) -> Any:
        del tensors

        def grad(_: tf.Tensor) -> list[tf.Tensor | None]:
            grads = computed.pop(number)
            if group.checked is not None:
                with without_colocation():
                    grads = group.checked(grads)
            return [grads[i] for i in floating]

        return tf.zeros([]), grad

    with tf.device(group.device):
        return anchor(*(group.tensors[i] for i in floating)) if floating else tf.zeros([])


_numbers = itertools.count()
# Part of the names that TensorFlow gives the function's graphs.
_PASS_ON_NAME = "__pipemesh_passes_on_"
_GRADIENT = "PipemeshGradient"
_unneeded = contextvars.ContextVar("pipemesh_no_gradients", default=False)


def no_gradients() -> contextlib.AbstractContextManager[Any]:
    """Attaches no gradients inside, for results that are never differentiated."""
    # Each custom gradient takes an operation that does nothing but carry it.
    return setting(_unneeded, True)


@tf.function(autograph=False)
def _pipemesh_passes_on(*tensors: tf.Tensor) -> list[tf.Tensor]:
    return [tf.identity(tensor) for tensor in tensors]


def passes_on(node: Any) -> bool:
    """Returns whether a `NodeDef` passes its inputs on because it had a custom gradient."""
    # Once the graph is differentiated, users of its outputs may use its inputs instead.
    return node.op == "PartitionedCall" and _PASS_ON_NAME in node.attr["f"].func.name


def had_gradient(node: Any) -> bool:
    """Returns whether a `NodeDef` on one device carried a custom gradient."""
    gradient = node.attr["_gradient_op_type"].s if "_gradient_op_type" in node.attr else b""
    return node.op == "IdentityN" and gradient.startswith(_GRADIENT.encode())


def first_only(
    outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], what: str, instead: str
) -> list[tf.Tensor]:
    """Returns gradients of `what` with respect to `inputs`; their gradients are a GradientError."""

    def backward(_: Any) -> list[tf.Tensor]:
        raise GradientError(
            f"second derivatives of {what} do not exist: its gradient is a loop that keeps nothing "
            f"to be differentiated by; {instead}, or differentiate once"
        )

    return attach_gradient(outputs, inputs, backward, across_devices=True)


def attach_gradient(
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[[list[tf.Tensor]], Sequence[tf.Tensor | None]],
    across_devices: bool,
) -> list[tf.Tensor]:
    """Returns `outputs`, through which gradients flow to `inputs` only as `backward` says. It is
    called outside any colocation, in the device scope of the first output; across devices it must
    enter device scopes itself.
    """
    # `tf.custom_gradient` passes all that it differentiates through one `IdentityN`, which would
    # copy the tensors of all devices to one. A function call does not: it is inlined before
    # operations are placed, and each tensor stays on its device.
    if _unneeded.get():
        return list(outputs)
    number = len(outputs)
    tensors = [*outputs, *inputs]

    def input_grads(*grads: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | None]:
        # Autodiff runs in no device scope, or in that of another device.
        scope = contextlib.nullcontext() if across_devices else tf.device(outputs[0].device)
        with without_colocation(), scope:
            # Gradients of lookups are sparse; communication is dense.
            return list(backward([tf.convert_to_tensor(grad) for grad in grads[:number]]))

    if tf.executing_eagerly():
        with unrecorded():
            results = [_identity_in_place(tensor) for tensor in outputs]
        record_call(results, inputs, input_grads)
        return results

    def all_grads(*grads: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | None]:
        return [None] * number + input_grads(*grads)

    # The second number is that of the gradients it reads; see `_zeros`.
    name = f"{_GRADIENT}{next(_numbers)}_{number}"
    graph = tf.compat.v1.get_default_graph()
    ops.RegisterGradient(name)(lambda _, *grads: all_grads(*grads))
    _hand_over([name], graph)
    kind = "PartitionedCall" if across_devices else "IdentityN"
    with graph.gradient_override_map({kind: name}), unrecorded():
        if across_devices:
            results = _call_pass_on(graph, tensors)
        else:
            with tf.device(outputs[0].device):
                results = tf.identity_n(tensors)
    record_call(results[:number], inputs, input_grads)
    return results[:number]


_zeros_like: Callable[..., Any] = control_flow_state.ZerosLike


def _zeros(operation: tf.Operation, index: int) -> tf.Tensor | None:
    """Returns zeros for an output that has no gradient; None if its custom gradient does not read
    them, as those of the inputs that `attach_gradient` passes on: one in six operations of a
    backward pass would be such zeros.
    """
    # TensorFlow computes the gradient of a call also where it ends, and takes no None there.
    if operation.type == "IdentityN":
        name = operation.node_def.attr["_gradient_op_type"].s.decode()
        read = re.fullmatch(rf"{_GRADIENT}\d+_(\d+)", name)
        if read and index >= int(read[1]):
            return None
    return _zeros_like(operation, index)


control_flow_state.ZerosLike = _zeros


def _identity_in_place(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.identity(tensor)


@functools.cache
def _pass_on(dtypes: tuple[tf.DType, ...]) -> Any:
    """Returns the one function that passes on tensors of these dtypes."""
    # A `tf.function` would be traced again for each call that draws by `plan_free_randomness`.
    # A shape may be None, against the declared type.
    specs = [
        tf.TensorSpec(None, dtype)  # pyright: ignore[reportArgumentType]
        for dtype in dtypes
    ]
    # Devices of the graph around would become those of the function.
    with tf.Graph().as_default():
        return _pipemesh_passes_on.get_concrete_function(*specs)


def _call_pass_on(graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    function = _pass_on(tuple(tensor.dtype for tensor in tensors))
    function.add_to_graph(graph)
    results = gen_functional_ops.partitioned_call(
        tensors,
        [tensor.dtype for tensor in tensors],
        tf.compat.v1.NameAttrList(name=function.name),
    )
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return list(results)


_resolve_grad_inputs = cond_v2._resolve_grad_inputs


def _resolve(branch: Any, gradient: Any) -> list[Any]:
    """Returns the inputs of the gradient of a branch of a `tf.cond`."""
    # TensorFlow's function raises an `AssertionError` for a tensor of a graph further out, such as
    # an argument of the program of a core. It is captured here; TensorFlow handles all others.
    outer, inputs = gradient.outer_graph, []
    for tensor in gradient.external_captures:
        further_out = surrounding_graphs(getattr(outer, "outer_graph", None))
        if tensor.graph is not branch and any(tensor.graph is graph for graph in further_out):
            inputs.append(outer.capture(tensor))
        else:
            single = types.SimpleNamespace(external_captures=[tensor], outer_graph=outer)
            inputs += _resolve_grad_inputs(branch, single)
    return inputs


def install_branch_gradients() -> None:
    """Makes second gradients of `tf.cond` possible if branches use tensors of outer graphs."""
    cond_v2._resolve_grad_inputs = _resolve
