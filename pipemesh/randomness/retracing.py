"""Functions and eager loops that draw as if their Python code stood where it is called.

TensorFlow traces a `tf.function` once and reuses the trace in any scope of random numbers. Inside a
scope a function is therefore traced anew: for each call while a graph is built, in eager mode for
each position that its draws can have among those of their layers.

A graph traces the functions of a `tf.while_loop` once, and the iteration is part of each key. In
eager mode they run repeatedly: each run begins with the same numbers and adds the iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipemesh.backend.patches import (
    extend_trace_keys,
    wrap_functions,
    wrap_loops,
    wrap_trace_lookup,
)
from pipemesh.randomness.scope import Numbers, Scope, scopes

_NUMBERS_AFTER = "_pipemesh_numbers_after"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a `tf.function` inside a scope."""

    function: Any
    # None where each processor computes on its own slice.
    scope: Scope | None
    # The numbers before the call.
    before: Numbers
    # Part of the key of the trace.
    key: Any
    # Whether later calls may find the trace.
    is_found_again: bool = False


def install_retracing() -> None:
    """Adds the scopes to the keys of traces; nothing changes outside a scope."""
    wrap_functions(lambda call: _in_scope(call, _call), lambda trace: _in_scope(trace, _new_trace))
    wrap_trace_lookup(_find_trace)
    extend_trace_keys(lambda: (scopes.calls[-1].key,) if scopes.calls else ())


def _in_scope(original: Callable[..., Any], make: Callable[[Any], _Call]) -> Callable[..., Any]:
    """Wraps a method of `tf.function` that finds or makes a trace."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not scopes.stack and not scopes.slicewise:
            return original(self, *args, **kwargs)
        scopes.calls.append(make(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            scopes.calls.pop()

    call.__name__, call.__doc__ = original.__name__, original.__doc__
    return call


def _new_trace(function: Any) -> _Call:
    if scopes.slicewise:
        # Nothing is drawn inside, so all traces are equal.
        return _Call(function, None, Numbers({}, {}), "slicewise")
    return _Call(function, scopes.stack[-1], scopes.stack[-1].numbers.copied(), object())


def _call(function: Any) -> _Call:
    new = _new_trace(function)
    scope = new.scope
    if scope is None or not tf.executing_eagerly():
        return new
    if scope.position is not None or scope.iterations or scope.turns:
        # The current values of these tensors would become part of the trace.
        return new
    state = [tuple(sorted(numbers.items())) for numbers in new.before]
    names = (scope.stack, scope.layer, tuple(sorted(scope.aliases.items())))
    return dataclasses.replace(new, key=(*names, *state), is_found_again=True)


def _find_trace(find: Callable[[], Any], is_of: Callable[[Any], bool]) -> Any:
    """Finds or makes a trace that begins with the numbers from before the call."""
    # A trace that was found has drawn as often as when it was made.
    call = scopes.calls[-1] if scopes.calls else None
    if call is None or call.scope is None or not is_of(call.function):
        return find()
    call.scope.numbers = call.before.copied()
    trace = find()
    after = getattr(trace, _NUMBERS_AFTER, None)
    if after is None:
        setattr(trace, _NUMBERS_AFTER, call.scope.numbers.copied())
    else:
        call.scope.numbers = after.copied()
    return trace


def install_eager_loops() -> None:
    """Adds the iterations of eager loops to the scope; nothing changes outside a scope."""
    wrap_loops(_loop_in_scope)


def _loop_in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(cond: Any, body: Any, loop_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if not scopes.stack or not tf.executing_eagerly():
            return original(cond, body, loop_vars, *args, **kwargs)
        scope = scopes.stack[-1]
        scope.turns = (*scope.turns, 0)
        try:
            once = _Once(scope, cond), _Once(scope, body, counts=True)
            return original(*once, loop_vars, *args, **kwargs)
        finally:
            scope.turns = scope.turns[:-1]

    call.__name__, call.__doc__ = original.__name__, original.__doc__
    return call


class _Once:
    """A function of a loop that takes its numbers once, however often it is called."""

    def __init__(self, scope: Scope, function: Callable[..., Any], counts: bool = False) -> None:
        self._scope, self._function, self._counts = scope, function, counts
        self._before: Numbers | None = None

    def __call__(self, *args: Any) -> Any:
        scope = self._scope
        if self._before is None:
            self._before = scope.numbers.copied()
            result = self._function(*args)
        else:
            after = scope.numbers
            scope.numbers = self._before.copied()
            result = self._function(*args)
            scope.numbers = after
        if self._counts:
            scope.turns = (*scope.turns[:-1], scope.turns[-1] + 1)
        return result
