"""Entries of a checkpoint: a variable, a tensor in slices, or a position in a dataset, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.cluster import host_of, own_host
from pipemesh.backend.saved_state import (
    SlicedVariable,
    is_iterator,
    iterator_state,
    set_iterator_state,
)
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Part:
    """A variable that holds a tensor or a slice of it."""

    # The slice as TensorFlow's checkpoints spell it, "" for the whole tensor.
    spec: str
    # In bytes.
    size: int
    # The CPU of the process that holds it.
    host: str
    # Returns the current value, on a host.
    read: Callable[[str], tf.Tensor]
    assign: Callable[[tf.Tensor], object]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named value of a checkpoint, and the variables that hold its parts."""

    name: str
    dtype: tf.DType
    # Of the whole tensor; None if it may differ from checkpoint to checkpoint.
    shape: tuple[int, ...] | None
    parts: Sequence[Part]


def entries_of(tracked: Mapping[str, Any]) -> list[Entry]:
    """Returns the entries of tracked values."""
    # A value is a `tf.Variable`, a `SlicedVariable` or an iterator over a `tf.data.Dataset`.
    return [_entry(name, value) for name, value in tracked.items()]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Values at one instant, independent of later updates of the variables."""

    # One of each for each part.
    names: list[str]
    specs: list[str]
    hosts: list[str]
    tensors: list[tf.Tensor]

    @classmethod
    def of(cls, entries: Sequence[Entry], left_there: Collection[str] = ()) -> Snapshot:
        """Returns the current values."""
        # On a host nothing is copied: a variable that is updated while its value is held gets new
        # memory. From other devices values are copied. Hosts in `left_there` keep their values;
        # values of other hosts are fetched to this process.
        parts = [(entry.name, part) for entry in entries for part in entry.parts]
        hosts = [part.host if part.host in left_there else own_host() for _, part in parts]
        tensors = [part.read(host) for (_, part), host in zip(parts, hosts, strict=True)]
        for tensor in tensors:
            # A worker answers before it has read; the next step, which comes to it by another way,
            # could change the variable first. The shape waits for the value.
            _ = tensor.shape
        return cls([name for name, _ in parts], [part.spec for _, part in parts], hosts, tensors)


def _entry(name: str, value: Any) -> Entry:
    if isinstance(value, SlicedVariable):
        variable, piece = value.parts[0]
        parts = [_part(v, s.spec(static_sizes(v))) for v, s in value.parts]
        return Entry(name, variable.dtype, piece.whole, parts)
    if is_iterator(value):

        def read(_: str) -> tf.Tensor:
            return iterator_state(value)

        part = Part("", 0, own_host(), read, lambda state: set_iterator_state(value, state))
        return Entry(name, tf.variant, None, [part])
    if isinstance(value, tf.Variable):
        return Entry(name, value.dtype, tuple(static_sizes(value)), [_part(value, "")])
    raise CheckpointError(
        f"{name!r} is a {type(value).__name__}; a checkpoint has variables, variables in slices "
        "and iterators over datasets"
    )


def _part(variable: tf.Variable, spec: str) -> Part:
    def read(host: str) -> tf.Tensor:
        # The host that reads it gets the value: it stays on the worker, or comes here.
        with tf.device(host):
            return variable.read_value()

    size = variable.dtype.size * (variable.shape.num_elements() or 0)
    return Part(spec, size, host_of(variable.device), read, variable.assign)


def chunks(parts: Iterable[tuple[Entry, Part]], most: int) -> Iterator[list[tuple[Entry, Part]]]:
    """Yields parts in groups of at most `most` bytes, or of one larger part."""
    group: list[tuple[Entry, Part]] = []
    held = 0
    for entry, part in parts:
        if group and held + part.size > most:
            yield group
            group, held = [], 0
        group.append((entry, part))
        held += part.size
    if group:
        yield group
