"""Texts on a terminal, piece by piece as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any

# What stands for bytes that are no character yet.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Stream:
    """Prints several texts in their order, each as far as it is known.

    Args:
        tokens: how they are spelled, a `pipemesh.training.command.decode.Tokens`.
        prompts: ids of the beginning of each.
        most: tokens that are added to each, unless one ends it before.
        out: where to; by default standard output.
    """

    def __init__(
        self, tokens: Any, prompts: Sequence[Sequence[int]], most: int, out: IO[str] | None = None
    ) -> None:
        self._tokens, self._prompts, self._most = tokens, prompts, most
        self._out = sys.stdout if out is None else out
        self._found: list[list[int]] = [[] for _ in prompts]
        self._now, self._shown = 0, ""

    def take(self, number: int, token: int) -> None:
        """Takes the next token of a text.

        Args:
            number: of the text.
            token: its id.
        """
        self._found[number].append(token)
        while self._now < len(self._prompts) and self._found[self._now]:
            if not self._show():
                return
            self._now, self._shown = self._now + 1, ""

    def _show(self) -> bool:
        """Prints what is known of the text that is due; returns whether it is done."""
        found = self._found[self._now]
        done = found[-1] in self._tokens.stop or len(found) == self._most
        text = self._tokens.text(self._prompts[self._now], found)
        # More tokens may change the end: a character may have several.
        sure = text if done else text.rstrip(_UNFINISHED)
        if sure.startswith(self._shown):
            self._out.write(sure[len(self._shown) :])
            self._shown = sure
        elif done:
            self._out.write(f"\n{text}")
        if done:
            self._out.write("\n")
        self._out.flush()
        return done
