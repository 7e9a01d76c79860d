"""Places that every caller inside of TensorFlow goes through, and that can be wrapped.

They are not public, but they are the only ones that catch everybody; the TensorFlow version is
pinned to 2.21. Whoever wraps one leaves it as it is where nothing of ours is entered.
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

# All functions that draw, print or summarize end in one of these modules.
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
    """The function that makes an operation, wrapped if it has been.

    Args:
        name: of the function, such as `stateless_random_uniform_v2`.
    """
    return getattr(_home(name), name)


def wrap_operation(name: str, wrap: Wrap) -> None:
    """Wraps the function that makes an operation.

    Args:
        name: of the function.
        wrap: wraps it.
    """
    setattr(_home(name), name, wrap(operation(name)))


def wrap_seeds(wrap: Wrap) -> None:
    """Wraps `get_seed`, by which operations that draw with state get their two seeds."""
    random_seed.get_seed = wrap(random_seed.get_seed)


def wrap_loops(wrap: Wrap) -> None:
    """Wraps what `tf.while_loop`, `tf.map_fn` and the like end in."""
    while_loop.while_loop = wrap(while_loop.while_loop)


def wrap_functions(call: Wrap, new_trace: Wrap) -> None:
    """Wraps the methods of `tf.function` objects.

    Args:
        call: wraps `__call__`.
        new_trace: wraps `get_concrete_function`.
    """
    function = polymorphic_function.Function
    function.__call__ = call(function.__call__)
    function.get_concrete_function = new_trace(function.get_concrete_function)


def wrap_trace_lookup(wrap: Callable[[Callable[[], Any], Callable[[Any], bool]], Any]) -> None:
    """Wraps what finds or makes the trace that a call of a `tf.function` runs.

    Args:
        wrap: takes what finds the trace and returns it, and what says of a `tf.function` whether
            it is the one that is called; returns the trace.
    """
    original = tracing_compilation._maybe_define_function

    def find(args: Any, kwargs: Any, options: Any) -> Any:
        return wrap(
            lambda: original(args, kwargs, options),
            lambda function: options.function_cache is function._function_cache,
        )

    tracing_compilation._maybe_define_function = find


def extend_trace_keys(extras: Callable[[], tuple[Any, ...]]) -> None:
    """Makes more count when TensorFlow looks for a trace that it has already.

    Args:
        extras: what counts now; nothing where it returns none.
    """
    original = function_context.make_function_context

    def make(scope_type: Any = None) -> Any:
        found = original(scope_type)
        more = extras()
        return found._replace(context=(found.context, *more)) if more else found

    function_context.make_function_context = make
