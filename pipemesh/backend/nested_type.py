"""Objects of ours that consist of tensors, at the boundaries of functions and loops."""

from __future__ import annotations

import contextvars
from typing import Any

from tensorflow.core.function.trace_type import custom_nest_trace_type, trace_type_builder
from tensorflow.python.autograph.operators import control_flow

_in_loop_check = contextvars.ContextVar("pipemesh_in_loop_check", default=False)


def nested_type(value: Any, context: Any) -> Any:
    """Returns the type by which a `tf.function` tells such arguments apart.

    TensorFlow chooses it itself unless the object also looks like an array. There is no public way
    to ask for it.

    Args:
        value: an object with `__tf_flatten__` and `__tf_unflatten__`.
        context: the argument of `__tf_tracing_type__`.
    """
    metadata, components = value.__tf_flatten__()
    kinds: Any = tuple(trace_type_builder.from_value(part, context) for part in components)
    return custom_nest_trace_type.CustomNestTraceType(type(value), metadata, kinds)


def in_loop_check() -> bool:
    """Whether autograph compares the structures of a loop's variables.

    It packs `None` for each tensor and expects the object. A tape packs `None` where there is no
    gradient, and its caller expects `None`.
    """
    return _in_loop_check.get()


def _verify(*args: Any, **kwargs: Any) -> Any:
    token = _in_loop_check.set(True)
    try:
        return _original(*args, **kwargs)
    finally:
        _in_loop_check.reset(token)


_original = control_flow.verify_tf_loop_vars
control_flow.verify_tf_loop_vars = _verify
