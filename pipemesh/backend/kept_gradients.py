"""Gradients of one's own that go when their graph goes, and checks of gradients that may be off.

TensorFlow keeps what `tf.custom_gradient` registers in a graph as long as the process lives, and
with it all that the gradient uses: the whole graph, once for each time that a function is traced.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import tensorflow as tf
from tensorflow.python.framework import ops

_F = TypeVar("_F", bound=Callable[..., Any])
# Where a graph keeps its gradients, by name.
_STORE = "_pipemesh_gradients"
# Operations that check what goes through them, and its gradient, too.
_CHECKING = ("CheckNumerics", "CheckNumericsV2")
_local = threading.local()


def register(name: str, gradient: Callable[..., Any], graph: tf.Graph) -> None:
    """Registers a gradient for operations of a graph, and of copies of it, while the graph lives.

    Args:
        name: by which operations ask for it.
        gradient: of an operation and the gradients of its results.
        graph: that keeps it.
    """
    ops.RegisterGradient(name)(gradient)
    _hand_over([name], graph)


def custom_gradient(function: _F) -> _F:
    """As `tf.custom_gradient`, but nothing outlives the graph that it was called in."""
    decorated = tf.custom_gradient(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if tf.executing_eagerly():
            return decorated(*args)
        registry = _registry()
        before = len(registry)
        results = decorated(*args)
        _hand_over(list(itertools.islice(registry, before, None)), tf.compat.v1.get_default_graph())
        return results

    return cast("_F", call)


@contextlib.contextmanager
def unchecked_gradients() -> Iterator[None]:
    """Gradients made inside pass `tf.debugging.check_numerics` whatever they are.

    What overflows because a loss is scaled is looked for behind all of them.
    """
    for name in _CHECKING:
        entry = _registry()[name]
        if not hasattr(entry["type"], "__wrapped__"):
            entry["type"] = _unless_unchecked(entry["type"])
    before, _local.is_unchecked = getattr(_local, "is_unchecked", False), True
    try:
        yield
    finally:
        _local.is_unchecked = before


def _unless_unchecked(gradient: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def call(operation: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
        if getattr(_local, "is_unchecked", False):
            return grad
        return gradient(operation, grad)

    return call


def _registry() -> dict[str, Any]:
    return ops.gradient_registry._registry


def _hand_over(names: list[str], graph: tf.Graph) -> None:
    """Lets a graph keep what was registered under some names."""
    registry = _registry()
    kept: dict[str, Any] = getattr(graph, _STORE, {})
    setattr(graph, _STORE, kept)
    owner = weakref.ref(graph)
    for name in names:
        if getattr(registry[name]["type"], _STORE, False):
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
