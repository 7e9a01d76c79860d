"""Functions that every caller inside TensorFlow goes through, and that can be wrapped.

They are not public, but only they catch every caller; the TensorFlow version is pinned to 2.21. A
wrapper must change nothing while no scope of this library is entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.eager.polymorphic_function import (
    function_context,
    polymorphic_function,
    tracing_compilation,
)
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import (
    gen_candidate_sampling_ops,
    gen_logging_ops,
    gen_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
    gen_summary_ops,
    while_loop,
)

# Takes a function and returns the one to call instead.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# All functions that draw, print or summarize end in these modules.
_GENERATED = (
    gen_random_ops,
    gen_candidate_sampling_ops,
    gen_stateless_random_ops_v2,
    gen_stateless_random_ops,
    gen_logging_ops,
    gen_summary_ops,
)


def _home(name: str) -> Any:
    return next(module for module in _GENERATED if hasattr(module, name))


def operation(name: str) -> Callable[..., Any]:
    """Returns the function that makes an operation, wrapped or not."""
    return getattr(_home(name), name)


def wrap_operation(name: str, wrap: Wrap) -> None:
    """Wraps the function that makes an operation."""
    setattr(_home(name), name, wrap(operation(name)))


def wrap_seeds(wrap: Wrap) -> None:
    """Wraps `get_seed`, which gives stateful random operations their two seeds."""
    random_seed.get_seed = wrap(random_seed.get_seed)


def wrap_loops(wrap: Wrap) -> None:
    """Wraps the function behind `tf.while_loop`, `tf.map_fn` and the like."""
    while_loop.while_loop = wrap(while_loop.while_loop)


def wrap_functions(call: Wrap, new_trace: Wrap) -> None:
    """Wraps `__call__` and `get_concrete_function` of `tf.function` objects."""
    function = polymorphic_function.Function
    function.__call__ = call(function.__call__)
    function.get_concrete_function = new_trace(function.get_concrete_function)


def wrap_trace_lookup(wrap: Callable[[Callable[[], Any], Callable[[Any], bool]], Any]) -> None:
    """Wraps the lookup of the trace that a call of a `tf.function` runs."""
    # `wrap` takes a function that finds or makes the trace, and a function that tells whether a
    # `tf.function` is the one being called; it returns the trace.
    original = tracing_compilation._maybe_define_function

    def find(args: Any, kwargs: Any, options: Any) -> Any:
        return wrap(
            lambda: original(args, kwargs, options),
            lambda function: options.function_cache is function._function_cache,
        )

    tracing_compilation._maybe_define_function = find


def extend_trace_keys(extras: Callable[[], tuple[Any, ...]]) -> None:
    """Adds `extras()` to the keys of traces, so that calls with other extras are traced anew."""
    original = function_context.make_function_context

    def make(scope_type: Any = None) -> Any:
        key = original(scope_type)
        more = extras()
        return key._replace(context=(key.context, *more)) if more else key

    function_context.make_function_context = make
