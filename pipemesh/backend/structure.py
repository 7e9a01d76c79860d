"""Nested structures of tensors, handled as flat lists."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.core.function.trace_type import custom_nest_trace_type, trace_type_builder
from tensorflow.python.autograph.operators import control_flow

from pipemesh.errors import PipelineError

# Anything with a shape and a dtype.
Spec = tf.Tensor | tf.TensorSpec
# `IndexedSlices` if sparse, None if absent.
Gradient = tf.Tensor | tf.IndexedSlices | None
T = TypeVar("T")


class Structure:
    """The nesting of tensors and None in a value, with a name for each tensor, as `state0.c`."""

    def __init__(self, value: Any, name: str) -> None:
        self._name = name
        self._present = tf.nest.map_structure(lambda leaf: leaf is not None, value)
        paths = zip(_paths(value, name), tf.nest.flatten(self._present), strict=True)
        self.leaf_names = [path for path, present in paths if present]

    def flatten(self, value: Any, name: str | None = None) -> list[Any]:
        """Returns the leaves that are tensors here; another nesting is an error."""
        name = name or self._name
        leaves = []
        for path, present, leaf in self._leaves(value, name):
            if present != (leaf is not None):
                kind = "None" if leaf is None else "a tensor"
                raise PipelineError(f"{path} is {kind}, unlike in {self._name}")
            if present:
                leaves.append(leaf)
        return leaves

    def _leaves(self, value: Any, name: str) -> list[tuple[str, bool, Any]]:
        """Returns for each leaf its name, whether it is a tensor here, and the leaf."""
        paths = _paths(value, name)
        present = tf.nest.flatten(self._present)
        if paths != _paths(self._present, name):
            raise PipelineError(
                f"{name} must be nested as {self._name}, which has {_listed(self.leaf_names)}; "
                f"it has {_listed(paths)}"
            )
        return list(zip(paths, present, tf.nest.flatten(value), strict=True))

    def tensors(self, value: Any) -> list[tf.Tensor]:
        """Returns the leaves of a value of this structure as tensors."""
        return [tf.convert_to_tensor(leaf) for leaf in self.flatten(value)]

    def tensors_like(self, specs: Sequence[Spec], value: Any, name: str) -> list[tf.Tensor]:
        """Returns the leaves as tensors, with dtypes and shapes of `specs` or an error."""
        leaves = self.flatten(value, name)
        result = []
        for leaf, spec, path in zip(leaves, specs, self.leaf_names, strict=True):
            tensor = tf.convert_to_tensor(leaf)
            if tensor.dtype != spec.dtype or not tensor.shape.is_compatible_with(spec.shape):
                raise PipelineError(
                    f"{name}{path.removeprefix(self._name)} is {tensor.dtype.name} of shape "
                    f"{tensor.shape}; like {path} it must be {spec.dtype.name} of shape "
                    f"{spec.shape}"
                )
            result.append(tf.ensure_shape(tensor, spec.shape))
        return result

    def gradients(self, specs: Sequence[Spec], value: Any, name: str) -> list[Gradient]:
        """Returns the gradients of leaves from a value nested alike, with more None."""
        result: list[Gradient] = []
        for path, present, grad in self._leaves(value, name):
            if not present:
                continue
            spec = specs[len(result)]
            if grad is None or not is_differentiable(spec):
                result.append(None)
                continue
            if not isinstance(grad, tf.IndexedSlices):
                grad = tf.convert_to_tensor(grad)
            if grad.dtype != spec.dtype or not grad.shape.is_compatible_with(spec.shape):
                raise PipelineError(
                    f"{path} is {grad.dtype.name} of shape {grad.shape}; the gradient must be "
                    f"{spec.dtype.name} of shape {spec.shape}"
                )
            result.append(grad)
        return result

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Returns a new value of this structure with these leaves."""
        values = iter(leaves)
        return tf.nest.map_structure(
            lambda present: next(values) if present else None, self._present
        )


def is_differentiable(tensor: Spec) -> bool:
    """Returns whether gradients flow through tensors of this dtype."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _paths(value: Any, name: str) -> list[str]:
    """Returns a name for each leaf, None included, in the order of `tf.nest.flatten`."""
    if isinstance(value, Mapping):
        items = [(str(key), value[key]) for key in sorted(value)]
    elif isinstance(value, (list, tuple)):
        items = [(str(number), part) for number, part in enumerate(value)]
    elif tf.nest.is_nested(value):
        return [f"{name}.{number}" for number, _ in enumerate(tf.nest.flatten(value))]
    else:
        return [name]
    return [path for key, part in items for path in _paths(part, f"{name}.{key}")]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing in it"


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[Any], value: T) -> Iterator[T]:
    """Sets a context variable inside the context, which yields the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_in_loop_check = contextvars.ContextVar("pipemesh_in_loop_check", default=False)


def nested_type(value: Any, context: Any) -> Any:
    """Returns the type by which a `tf.function` distinguishes such arguments."""
    # TensorFlow chooses it itself unless the object also looks like an array, and offers no public
    # way to ask for it. The object has `__tf_flatten__` and `__tf_unflatten__`; `context` is the
    # argument of its `__tf_tracing_type__`.
    metadata, components = value.__tf_flatten__()
    kinds: Any = tuple(trace_type_builder.from_value(part, context) for part in components)
    return custom_nest_trace_type.CustomNestTraceType(type(value), metadata, kinds)


def in_loop_check() -> bool:
    """Returns whether autograph is comparing the structures of a loop's variables."""
    # Autograph packs None for each tensor and expects the object. A tape packs None for a missing
    # gradient, and its caller expects None.
    return _in_loop_check.get()


def _verify(*args: Any, **kwargs: Any) -> Any:
    with setting(_in_loop_check, True):
        return _verify_tf_loop_vars(*args, **kwargs)


_verify_tf_loop_vars = control_flow.verify_tf_loop_vars
control_flow.verify_tf_loop_vars = _verify
