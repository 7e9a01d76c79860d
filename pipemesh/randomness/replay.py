"""Draws that are made once more, for a gradient."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipemesh.randomness.scope import Scope, scopes, tensors_of


class Replay:
    """Remembers the scope of now, if there is one, and which numbers come next in it.

    What is computed inside of `enter`, once for a result and once more for its gradient, draws the
    same numbers each time.

    Attributes:
        tensors: what draws depend on; a function that may capture nothing takes them as arguments.
    """

    def __init__(self) -> None:
        self._scope = scopes.stack[-1] if scopes.stack else None
        self.tensors: list[tf.Tensor] = []
        if self._scope is not None:
            self._state = dataclasses.replace(
                self._scope, numbers=self._scope.numbers.copied(), is_gradient=False
            )
            self.tensors = tensors_of(self._state)

    @contextlib.contextmanager
    def enter(self, tensors: Sequence[tf.Tensor]) -> Iterator[None]:
        """Enters the scope in its remembered state.

        Args:
            tensors: takes the place of the attribute.
        """
        scope = self._scope
        if scope is None:
            yield
            return
        again = _with_tensors(self._state, tensors)
        again.numbers = self._state.numbers.copied()
        scopes.stack.append(again)
        try:
            yield
        finally:
            scopes.stack.pop()
            for mine, theirs in zip(scope.numbers, again.numbers, strict=True):
                mine.update({key: max(n, mine.get(key, 0)) for key, n in theirs.items()})


def _with_tensors(scope: Scope, tensors: Sequence[tf.Tensor]) -> Scope:
    """The same scope with others in the place of `tensors_of`."""
    given = iter(tensors)
    step = None if scope.step is None else next(given)
    position = scope.position
    if position is not None:
        position = dataclasses.replace(position, microbatch=next(given))
        if position.slice is not None:
            position = dataclasses.replace(position, slice=next(given))
    return dataclasses.replace(scope, step=step, position=position, iterations=tuple(given))
