"""A `tf.function` draws as if its Python code stood where it is called.

TensorFlow traces a function once and calls the trace ever after, whatever scope of random numbers
it is called in. Inside of a scope it is therefore traced anew: for each call while a graph is
built, in eager mode for each place that its draws can have among those of their layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

# Where TensorFlow looks for a trace, and what it compares; the version is pinned to 2.21.
from tensorflow.python.eager.polymorphic_function import (
    function_context,
    polymorphic_function,
    tracing_compilation,
)

from pipemesh.lowering.random_scope import Numbers, Scope, scopes

_NUMBERS_AFTER = "_pipemesh_numbers_after"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a `tf.function` inside of a scope.

    Attributes:
        function: the function.
        scope: the scope; None where each processor computes with a slice of its own.
        before: the numbers before the call.
        key: what the trace is found by.
    """

    function: Any
    scope: Scope | None
    before: Numbers
    key: Any


def install_retracing() -> None:
    """Puts the scopes into the keys of traces; without a scope nothing changes."""
    function = polymorphic_function.Function
    function.__call__ = _in_scope(function.__call__)
    function.get_concrete_function = _in_scope(function.get_concrete_function)
    find = tracing_compilation._maybe_define_function
    tracing_compilation._maybe_define_function = _counted(find)
    context = function_context.make_function_context
    function_context.make_function_context = _keyed(context)


def _in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of `tf.function` that finds or makes a trace."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not scopes.stack and not scopes.slicewise:
            return original(self, *args, **kwargs)
        with _entered(self):
            return original(self, *args, **kwargs)

    call.__name__, call.__doc__ = original.__name__, original.__doc__
    return call


@contextlib.contextmanager
def _entered(function: Any) -> Iterator[None]:
    scopes.calls.append(_call(function))
    try:
        yield
    finally:
        scopes.calls.pop()


def _call(function: Any) -> _Call:
    if scopes.slicewise:
        # Nothing is drawn inside, so all traces are alike.
        return _Call(function, None, Numbers({}, {}), "slicewise")
    scope = scopes.stack[-1]
    before = scope.numbers.copied()
    if scope.graph is not None or scope.position is not None or (*scope.iterations, *scope.turns):
        return _Call(function, scope, before, object())
    state = [tuple(sorted(numbers.items())) for numbers in before]
    aliases = tuple(sorted(scope.aliases.items()))
    return _Call(function, scope, before, (scope.stack, scope.layer, aliases, *state))


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what finds or makes a trace: each begins with the numbers from before the call.

    A trace that is found has drawn as often as when it was made.
    """

    def find(args: Any, kwargs: Any, options: Any) -> Any:
        call = scopes.calls[-1] if scopes.calls else None
        if (
            call is None
            or call.scope is None
            or options.function_cache is not call.function._function_cache
        ):
            return original(args, kwargs, options)
        call.scope.numbers = call.before.copied()
        trace = original(args, kwargs, options)
        after = getattr(trace, _NUMBERS_AFTER, None)
        if after is None:
            setattr(trace, _NUMBERS_AFTER, call.scope.numbers.copied())
        else:
            call.scope.numbers = after.copied()
        return trace

    return find


def _keyed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what TensorFlow compares to find a trace."""

    def make(scope_type: Any = None) -> Any:
        found = original(scope_type)
        if not scopes.calls:
            return found
        return found._replace(context=(found.context, scopes.calls[-1].key))

    return make
