"""What a checkpoint has under a name: a variable, a tensor in slices, or a place in a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.cluster import host_of, own_host
from pipemesh.backend.iterators import is_iterator, iterator_state, set_iterator_state
from pipemesh.backend.sliced_variables import SlicedVariable
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Part:
    """A variable that has all of a tensor, or a slice of it.

    Attributes:
        spec: which slice, as TensorFlow's checkpoints spell it; "" for all.
        size: bytes.
        host: the CPU of the process that has it.
        read: gives its value now, on a host.
        assign: gives it another value.
    """

    spec: str
    size: int
    host: str
    read: Callable[[str], tf.Tensor]
    assign: Callable[[tf.Tensor], object]


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is saved under a name.

    Attributes:
        name: in the checkpoint; it says nothing of devices or slices.
        dtype: of the tensor.
        shape: of the whole tensor; None if it may differ from checkpoint to checkpoint.
        parts: of which it is made.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int, ...] | None
    parts: Sequence[Part]


def entries_of(tracked: Mapping[str, Any]) -> list[Entry]:
    """What is saved.

    Args:
        tracked: by name a `tf.Variable`, a `SlicedVariable`, or an iterator over a
            `tf.data.Dataset`.

    Raises:
        CheckpointError: something else is to be saved.
    """
    return [_entry(name, value) for name, value in tracked.items()]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Values at one instant, whatever becomes of the variables.

    Attributes:
        names: one for each part.
        specs: which slice each part is; "" for all of a tensor.
        hosts: which host each lies on.
        tensors: the values.
    """

    names: list[str]
    specs: list[str]
    hosts: list[str]
    tensors: list[tf.Tensor]

    @classmethod
    def of(cls, entries: Sequence[Entry], left_there: Collection[str] = ()) -> Snapshot:
        """Takes the values of now.

        On a host nothing is copied: a variable that is changed while somebody else holds its value
        gets memory of its own then. From other devices values are copied.

        Args:
            entries: of these.
            left_there: hosts whose values stay with them; others are brought to this process.
        """
        parts = [(entry.name, part) for entry in entries for part in entry.parts]
        hosts = [part.host if part.host in left_there else own_host() for _, part in parts]
        return cls(
            [name for name, _ in parts],
            [part.spec for _, part in parts],
            hosts,
            [part.read(host) for (_, part), host in zip(parts, hosts, strict=True)],
        )


def _entry(name: str, value: Any) -> Entry:
    if isinstance(value, SlicedVariable):
        first, of = value.parts[0]
        parts = [_part(variable, s.spec(static_sizes(variable))) for variable, s in value.parts]
        return Entry(name, first.dtype, of.whole, parts)
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
        # Where it is read it lies on: that of a worker comes here, or stays.
        with tf.device(host):
            return variable.read_value()

    size = variable.dtype.size * (variable.shape.num_elements() or 0)
    return Part(spec, size, host_of(variable.device), read, variable.assign)


def chunks(parts: Iterable[tuple[Entry, Part]], most: int) -> Iterator[list[tuple[Entry, Part]]]:
    """Parts in groups of so many bytes at most, or of one part that has more.

    Args:
        parts: and of what they are parts.
        most: bytes.
    """
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
