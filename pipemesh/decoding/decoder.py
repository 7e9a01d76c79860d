"""Decoding of many prompts: free rows take waiting prompts."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.decoding.beam import Beams
from pipemesh.decoding.choice import Continuation, Sampled, check_ids, check_numbers
from pipemesh.decoding.generator import Generator, Group, SimdGenerator
from pipemesh.decoding_limits import SourcePrompt
from pipemesh.errors import DecodingError

# Tokens per row between two checks for complete rows. With more, complete rows wait longer for new
# prompts. With fewer, starting the loop takes a larger share of the time.
_STEPS_A_LOOK = 16
# Minimum of positions that prompts are padded to.
_SHORTEST = 8


class Decoder:
    """A loop that continues prompts, several groups at a time.

    Args:
        generator: computes tokens.
        rows: number of prompts per group.
        groups: number of groups at a time.
        length: maximum number of tokens of a prompt and its continuation together.
        vocab_size: ids must be below it.
        source_length: maximum number of tokens of a source. A prompt is a `SourcePrompt` then; None
            for models that continue their prompts.
        seed: the seed of drawn tokens. A token depends on it, on the prompt's number and on its
            position, but not on the plan or on other prompts.
        steps: maximum number of tokens between two checks for complete rows; by default all
            remaining tokens, if nothing can end a row earlier.
        watch: called with a prompt's number and each of its tokens as soon as it is known, if
            prompts have one row each.

    Raises:
        DecodingError: the vocabulary is too small for the chooser, `watch` needs a sampler, or the
            generator reads no sources.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        rows: int,
        groups: int,
        length: int,
        vocab_size: int,
        source_length: int | None = None,
        seed: int = 0,
        steps: int | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        generator.chooser.check(vocab_size, generator.stop)
        if watch is not None and generator.chooser.width > 1:
            raise DecodingError(
                "watch is not supported by a beam search, whose tokens are known at its end; "
                "use a Sampler"
            )
        if source_length is not None and isinstance(generator, SimdGenerator):
            raise DecodingError(
                "lowering='simd' decodes no model that reads a source; set lowering='placement'"
            )
        self._watch, self._source_length = watch, source_length
        self._generator, self._length, self._vocab_size = generator, length, vocab_size
        self._seed = seed
        self._steps = steps or (_STEPS_A_LOOK if generator.stop else length)
        self._slots: list[list[Sampled | Beams | None]] = [[None] * rows for _ in range(groups)]
        self._groups: list[Group | None] = [None] * groups
        self._error: DecodingError | None = None

    def check(self, prompt: Sequence[int] | SourcePrompt, max_tokens: int, number: int = 0) -> None:
        """Checks that a prompt, given as ids, can be continued by `max_tokens` tokens.

        Raises:
            DecodingError: the prompt or its source is empty or too long, or an id is not in the
                vocabulary. The error names the prompt by `number`.
        """
        if isinstance(prompt, SourcePrompt) != (self._source_length is not None):
            needed = "SourcePrompts" if self._source_length is not None else "ids"
            raise DecodingError(f"prompt {number} is {prompt!r}; this model reads {needed}")
        if isinstance(prompt, SourcePrompt):
            source, prompt = prompt
            most = self._source_length or 0
            if not 0 < len(source) <= most:
                raise DecodingError(f"source {number} has {len(source)} tokens; give 1 to {most}")
            check_ids(f"source {number}", source, self._vocab_size)
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
        check_ids(f"prompt {number}", prompt, self._vocab_size)

    def generate(
        self, prompts: Iterable[Sequence[int] | SourcePrompt], max_tokens: int
    ) -> Iterator[Continuation]:
        """Continues prompts, and yields each when it is complete.

        Args:
            prompts: the ids of each prompt; a `SourcePrompt` each if the model reads a source.
            max_tokens: maximum number of tokens to add to each.

        Yields:
            A `Continuation` for each prompt.

        Raises:
            DecodingError: a prompt cannot be continued, or logits are NaN. Earlier prompts are
                continued first.
        """
        # Remove rows of an earlier call that was not exhausted.
        self._slots = [[None] * len(slots) for slots in self._slots]
        self._error = None
        waiting = enumerate(prompts)
        while True:
            yield from self._fill(waiting, max_tokens)
            active = [row for slots in self._slots for row in slots if row is not None]
            if not active:
                if self._error is not None:
                    raise self._error
                return
            # No row is complete before the shortest one.
            steps = min(self._steps, min(row.left for row in active))
            groups = [group for group in self._groups if group is not None]
            groups, results = self._generator.go_on(groups, steps)
            self._groups[: len(groups)] = groups
            for number, tensors in enumerate(results):
                yield from self._take(number, [tensor.numpy() for tensor in tensors])

    def _fill(self, waiting: Iterator[Any], max_tokens: int) -> Iterator[Continuation]:
        """Puts waiting prompts into free rows until either run out."""
        while True:
            new: dict[int, dict[int, Sequence[int] | SourcePrompt]] = collections.defaultdict(dict)
            # In turn, so that each group gets some.
            places = itertools.product(range(len(self._slots[0])), range(len(self._slots)))
            for row, group in places:
                if self._slots[group][row] is not None:
                    continue
                number, prompt = next(waiting, (None, ()))
                if number is None or self._error is not None:
                    break
                try:
                    self.check(prompt, max_tokens, number)
                except DecodingError as error:
                    # The error is raised when the earlier prompts are complete.
                    self._error = error
                    break
                chooser, stop = self._generator.chooser, self._generator.stop
                self._slots[group][row] = chooser.row(number, max_tokens, stop)
                new[group][row] = prompt
            if not new:
                return
            numbers = sorted(new)
            begun = {group is not None for group in self._groups}
            whole = len(numbers) == len(self._slots) and len(begun) == 1
            # All together or one by one: each other set of groups would need its own graph.
            for together in [numbers] if whole else [[number] for number in numbers]:
                size = self._size(len(_begun(each)) for n in together for each in new[n].values())
                prompts = [self._prompt(self._slots[n], new[n], size) for n in together]
                before = [self._groups[n] for n in together]
                results = self._generator.begin(together, prompts, before)
                for number, (group, tensors) in zip(together, results, strict=True):
                    self._groups[number] = group
                    values = [tensor.numpy()[None] for tensor in tensors]
                    yield from self._take(number, values, new[number])

    def _size(self, lengths: Iterable[int]) -> int:
        """Returns the positions for prompts: a power of two, to limit the number of graphs."""
        power = 1 << (max(lengths) - 1).bit_length()
        return min(max(power, _SHORTEST), self._length)

    def _prompt(
        self,
        slots: Sequence[Sampled | Beams | None],
        new: dict[int, Sequence[int] | SourcePrompt],
        size: int,
    ) -> Any:
        """Returns ids, lengths, seeds, and sources if the model reads them, of a group in which
        some rows are new.
        """
        ids = np.zeros([len(slots), size], np.int32)
        lengths = np.zeros([len(slots)], np.int32)
        seeds = np.zeros([len(slots), 2], np.int32)
        sources = np.full([len(slots), self._source_length or 0], -1, np.int32)
        for row, given in new.items():
            prompt = _begun(given)
            ids[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
            slot = slots[row]
            assert slot is not None
            seeds[row] = _seed(self._seed, slot.number), len(prompt)
            if isinstance(given, SourcePrompt):
                sources[row, : len(given.source)] = given.source
        return ids, lengths, seeds, *([] if self._source_length is None else [sources])

    def _take(
        self, number: int, results: Sequence[Any], rows: Collection[int] | None = None
    ) -> Iterator[Continuation]:
        """Passes the results of a group to its rows; yields complete continuations."""
        slots = self._slots[number]
        for place, row in enumerate(slots):
            if row is None or (rows is not None and place not in rows):
                continue
            for step in zip(*(values[:, place] for values in results), strict=True):
                check_numbers(step[-1])
                if self._watch is not None:
                    self._watch(row.number, int(step[0]))
                continuation = row.take(*step)
                if continuation is not None:
                    slots[place] = None
                    yield continuation
                    break


def _begun(prompt: Sequence[int] | SourcePrompt) -> Sequence[int]:
    """Returns the ids that are continued."""
    return prompt.ids if isinstance(prompt, SourcePrompt) else prompt


def _seed(seed: int, number: int) -> int:
    """Returns an int32 for a prompt, far from those of neighbouring prompts."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0xBF58476D1CE4E5B9 % 2**64
    return (mixed >> 33) & 0x7FFFFFFF
