"""A `tf.while_loop` in eager mode draws what it draws in a graph.

In a graph its functions are traced once, and the iteration is part of each key. In eager mode they
run again and again; each time they begin with the same numbers, and the iteration is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipemesh.backend.patches import wrap_loops
from pipemesh.randomness.scope import Numbers, Scope, scopes


def install_eager_loops() -> None:
    """Puts the iterations of eager loops into the scope; without a scope nothing changes."""
    wrap_loops(_counted)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
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
    """A function of a loop, which takes its numbers once, however often it is called."""

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
