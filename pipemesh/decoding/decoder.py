"""Continues prompts: as many at a time as there is room for, the others when a row is free."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.decoding.choice import Continuation, Row, check_numbers
from pipemesh.decoding.generator import Generator
from pipemesh.decoding.group import Group
from pipemesh.decoding.simd_generator import SimdGenerator
from pipemesh.errors import DecodingError

# Tokens a row between two looks at which rows are done. With more, rows that are done wait longer
# for others to take their places; with fewer, starting the loop takes more of the time.
_STEPS_A_LOOK = 16
# Prompts are filled up to at least so many places.
_SHORTEST = 8


class Decoder:
    """Continues prompts.

    Args:
        generator: computes tokens.
        rows: prompts a group.
        groups: how many groups are under way.
        length: tokens of prompt and continuation together, at most.
        vocab_size: ids are below it.
        seed: of what is drawn. A token depends on it, on the number of the prompt and on its place:
            neither on the plan nor on what else is continued.
        steps: tokens between two looks at which rows are done, at most; by default as many as there
            are to come, if nothing can end a row before.
        watch: called with the number of a prompt and each of its tokens as soon as it is known, if
            prompts have one row each.

    Raises:
        DecodingError: tokens cannot be chosen in this way of so many, or not be watched.
    """

    def __init__(
        self,
        generator: Generator | SimdGenerator,
        *,
        rows: int,
        groups: int,
        length: int,
        vocab_size: int,
        seed: int = 0,
        steps: int | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        generator.chooser.check(vocab_size, generator.stop)
        if watch is not None and generator.chooser.width > 1:
            raise DecodingError(
                "a search knows its tokens when it is over; watch what a sampler chooses"
            )
        self._watch = watch
        self._generator, self._length, self._vocab_size = generator, length, vocab_size
        self._seed = seed
        self._steps = steps or (_STEPS_A_LOOK if generator.stop else length)
        self._slots: list[list[Row | None]] = [[None] * rows for _ in range(groups)]
        self._groups: list[Group | None] = [None] * groups
        self._wrong: DecodingError | None = None

    def check(self, prompt: Sequence[int], max_tokens: int, number: int = 0) -> None:
        """Checks that a prompt can be continued.

        Args:
            prompt: ids.
            max_tokens: how many tokens to add at most.
            number: of the prompt, for errors.

        Raises:
            DecodingError: it cannot.
        """
        if max_tokens < 1:
            raise DecodingError(f"max_tokens is {max_tokens}; ask for 1 or more")
        if not len(prompt):
            raise DecodingError(f"prompt {number} is empty; give one token or more")
        if len(prompt) + max_tokens > self._length:
            left = self._length - len(prompt)
            raise DecodingError(
                f"prompt {number} has {len(prompt)} tokens, with {max_tokens} more it exceeds "
                f"the model's {self._length}; give a shorter one"
                + (f", or ask for {left} at most" if left > 0 else "")
            )
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise DecodingError(
                    f"prompt {number} has the token {token}; ids are from 0 to "
                    f"{self._vocab_size - 1}"
                )

    def generate(self, prompts: Iterable[Sequence[int]], max_tokens: int) -> Iterator[Continuation]:
        """Continues prompts, and yields each when it is done.

        Args:
            prompts: ids of each.
            max_tokens: how many tokens to add to each at most.

        Raises:
            DecodingError: one cannot be continued; those before it are. Or logits are not numbers.
        """
        # What another call has left, if nobody waited for its end.
        self._clear()
        waiting = enumerate(prompts)
        while True:
            yield from self._fill(waiting, max_tokens)
            active = [row for slots in self._slots for row in slots if row is not None]
            if not active:
                if self._wrong is not None:
                    raise self._wrong
                return
            # Nobody is done before the first one is.
            steps = min(self._steps, min(row.left for row in active))
            groups = [group for group in self._groups if group is not None]
            groups, found = self._generator.go_on(groups, steps)
            self._groups[: len(groups)] = groups
            for number, told in enumerate(found):
                yield from self._take(number, [each.numpy() for each in told])

    def _clear(self) -> None:
        self._slots = [[None] * len(slots) for slots in self._slots]
        self._wrong = None

    def _fill(self, waiting: Iterator[Any], max_tokens: int) -> Iterator[Continuation]:
        """Puts prompts where rows are free, until there is none of either."""
        while True:
            new: dict[int, dict[int, Sequence[int]]] = collections.defaultdict(dict)
            # Round about, so that each group has some.
            rows = range(len(self._slots[0]))
            free = [
                (group, row)
                for row in rows
                for group, slots in enumerate(self._slots)
                if slots[row] is None
            ]
            for group, row in free:
                number, prompt = next(waiting, (None, ()))
                if number is None or self._wrong is not None:
                    break
                try:
                    self.check(prompt, max_tokens, number)
                except DecodingError as error:
                    # It is raised when those before it are done.
                    self._wrong = error
                    break
                chooser, stop = self._generator.chooser, self._generator.stop
                self._slots[group][row] = chooser.row(number, max_tokens, stop)
                new[group][row] = prompt
            if not new:
                return
            numbers = sorted(new)
            begun = {group is not None for group in self._groups}
            whole = len(numbers) == len(self._slots) and len(begun) == 1
            # All of them together or one by one: each set of groups had its own graph.
            for together in [numbers] if whole else [[number] for number in numbers]:
                size = self._size(len(prompt) for n in together for prompt in new[n].values())
                prompts = [self._prompt(self._slots[n], new[n], size) for n in together]
                before = [self._groups[n] for n in together]
                found = self._generator.begin(together, prompts, before)
                for number, (group, told) in zip(together, found, strict=True):
                    self._groups[number] = group
                    told = [each.numpy()[None] for each in told]
                    yield from self._take(number, told, new[number])

    def _size(self, lengths: Iterable[int]) -> int:
        """Places for prompts: a power of two, so there are few graphs."""
        longest, size = max(lengths), _SHORTEST
        while size < longest:
            size *= 2
        return min(size, self._length)

    def _prompt(self, slots: Sequence[Row | None], new: dict[int, Sequence[int]], size: int) -> Any:
        """Ids, lengths and seeds of a group, of which some rows are new."""
        ids = np.zeros([len(slots), size], np.int32)
        lengths = np.zeros([len(slots)], np.int32)
        seeds = np.zeros([len(slots), 2], np.int32)
        for row, prompt in new.items():
            ids[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
            slot = slots[row]
            assert slot is not None
            seeds[row] = _seed(self._seed, slot.number), len(prompt)
        return ids, lengths, seeds

    def _take(
        self, number: int, told: Sequence[Any], rows: Collection[int] | None = None
    ) -> Iterator[Continuation]:
        """Takes what is told of a group, steps and prompts in front; yields what is done by it."""
        slots = self._slots[number]
        for place, row in enumerate(slots):
            if row is None or (rows is not None and place not in rows):
                continue
            for step in zip(*(each[:, place] for each in told), strict=True):
                check_numbers(step[-1])
                if self._watch is not None:
                    self._watch(row.number, int(step[0]))
                found = row.take(*step)
                if found is not None:
                    slots[place] = None
                    yield found
                    break


def _seed(seed: int, number: int) -> int:
    """An int32 for a prompt: neighbours have seeds that are far from each other."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0xBF58476D1CE4E5B9 % 2**64
    return (mixed >> 33) & 0x7FFFFFFF
