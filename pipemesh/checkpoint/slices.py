"""Slices of variables by logical name, and the workers that read and write them."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.cluster import host_of, own_host, task_of
from pipemesh.backend.saved_state import (
    SlicedVariable,
    device_of_iterator,
    is_iterator,
    iterator_state,
    set_iterator_state,
)
from pipemesh.backend.static_shape import static_sizes
from pipemesh.checkpoint.files import escaped, is_pattern
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

        def read(host: str) -> tf.Tensor:
            with tf.device(host):
                return tf.identity(iterator_state(value))

        host = host_of(device_of_iterator(value))
        part = Part("", 0, host, read, lambda state: set_iterator_state(value, state))
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


class JoinedFiles:
    """Writes values on the hosts that hold them, and joins the files."""

    # The graph is kept from checkpoint to checkpoint while names and hosts stay the same.

    def __init__(self) -> None:
        self._layout: object = None
        self._write: Callable[..., object] | None = None

    def write(self, snapshot: Snapshot, path: str) -> None:
        """Writes data and index of a checkpoint into a private folder, on hosts that see it."""
        hosts = list(dict.fromkeys(snapshot.hosts))
        if hosts == [own_host()]:
            write_tensors(hosts[0], path, snapshot.names, snapshot.specs, snapshot.tensors)
            return
        layout = snapshot.names, snapshot.specs, snapshot.hosts
        if self._write is None or layout != self._layout:
            self._layout, self._write = layout, _writer(hosts, *layout)
        # A worker of a killed run may still be writing, under the same path.
        mark = secrets.token_hex(8)
        parts = [f"{path}-{mark}-{number}" for number in range(len(hosts))]
        prefixes = [absolute(part, host) for part, host in zip(parts, hosts, strict=True)]
        self._write([tf.constant(prefix) for prefix in prefixes], snapshot.tensors)
        join_files(own_host(), parts, path)


def _writer(
    hosts: Sequence[str], names: Sequence[str], specs: Sequence[str], places: Sequence[str]
) -> Callable[..., object]:
    """Returns a function in which all hosts write their values at the same time."""
    # One after the other, a worker would answer a training step only after it has written.
    indices = {host: [i for i, place in enumerate(places) if place == host] for host in hosts}

    @tf.function(autograph=False)
    def write(prefixes: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> None:
        for (host, chosen), prefix in zip(indices.items(), prefixes, strict=True):
            write_tensors(
                host,
                prefix,
                [names[i] for i in chosen],
                [specs[i] for i in chosen],
                [tensors[i] for i in chosen],
            )

    return write


def write_tensors(
    host: str,
    prefix: object,
    names: Sequence[str],
    specs: Sequence[str],
    tensors: Sequence[tf.Tensor],
) -> None:
    """Writes tensors or slices on a host, as files with a common prefix."""
    with tf.device(host):
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors
        )


def join_files(host: str, parts: Sequence[str], path: str) -> None:
    """Makes one checkpoint of several on a host, which reads only their indices."""
    with tf.device(host):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=path, delete_old_dirs=False
        )


# Reported messages: action, folder and host.
_reported: set[tuple[str, str, str]] = set()


def writers(folder: str, hosts: Iterable[str]) -> list[str]:
    """Returns the workers among some hosts that can write into a folder of this process."""
    # Each must read a file that this process writes now, and write one that this process can read.
    # For each worker that cannot, a message appears once on standard error.
    hosts = _workers(hosts)
    if not hosts:
        return []
    mark = os.path.join(os.path.abspath(folder), f".shared-{secrets.token_hex(8)}")
    try:
        with open(mark, "w") as file:
            file.write(mark)
        able = [host for host in hosts if _writes(folder, host, mark)]
    finally:
        for file in glob.glob(f"{glob.escape(mark)}*"):
            with contextlib.suppress(OSError):
                os.unlink(file)
    return able


def readers(path: str, hosts: Iterable[str]) -> list[str]:
    """Returns the workers among some hosts that see a checkpoint under its path here."""
    # For each worker that does not, a message appears once on standard error.
    hosts = _workers(hosts)
    if not hosts:
        return []
    path = os.path.abspath(path)
    if is_pattern(path):
        for host in hosts:
            say_once("reads", path, host, "cannot read a path with [ or \\")
        return []
    try:
        identity = _contents(path, own_host())
    except tf.errors.NotFoundError:
        # An old format without an index: the reader reports it.
        return hosts
    return [host for host in hosts if _reads(path, host, identity)]


def absolute(prefix: str, host: str) -> str:
    """Returns a path for another process, whose working directory may differ."""
    return prefix if host == own_host() else os.path.abspath(prefix)


def say_once(doing: str, folder: str, host: str, why: str) -> None:
    """Reports once that this process reads or writes for a worker, and why."""
    if (doing, folder, host) not in _reported:
        _reported.add((doing, folder, host))
        print(
            f"{folder}: worker {task_of(host)} {why}; this process {doing} for it. Put the folder "
            "on a file system that all hosts share under one path to avoid this",
            file=sys.stderr,
        )


def _workers(hosts: Iterable[str]) -> list[str]:
    return [host for host in dict.fromkeys(hosts) if task_of(host) is not None]


def _writes(folder: str, host: str, mark: str) -> bool:
    answer = f"{mark}-{task_of(host)}"
    try:
        with tf.device(host):
            # Read first: writing would create a missing folder.
            if tf.io.read_file(mark).numpy().decode() != mark:
                raise CheckpointError("sees another folder there")
            tf.io.write_file(answer, mark)
            # Reading waits for the write, which has no result.
            tf.io.read_file(answer).numpy()
        with open(answer) as file:
            if file.read() == mark:
                return True
        why = "writes a file that this process reads otherwise"
    except CheckpointError as error:
        why = str(error)
    except tf.errors.OpError as error:
        why = _why(error)
    except OSError as error:
        why = f"writes a file that this process does not see ({error.strerror})"
    say_once("writes", folder, host, why)
    return False


def _reads(path: str, host: str, identity: object) -> bool:
    try:
        if _contents(path, host) == identity:
            return True
        why = "sees another checkpoint, or a part of it, under that name"
    except tf.errors.OpError as error:
        why = _why(error)
    say_once("reads", path, host, why)
    return False


def _contents(path: str, host: str) -> tuple[bytes, list[bytes]]:
    """Returns what identifies a checkpoint on a host: a digest of the index, data files."""
    with tf.device(host):
        index = tf.io.read_file(f"{path}.index")
        digest = tf.raw_ops.Fingerprint(data=index[None], method="farmhash64")
        names = tf.io.matching_files(f"{escaped(path)}.data-*")
    return digest.numpy().tobytes(), sorted(os.path.basename(n) for n in names.numpy())


def _why(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.NotFoundError):
        return "does not see it"
    if isinstance(error, tf.errors.PermissionDeniedError):
        return "may not read and write there"
    return f"cannot use it ({error.message.splitlines()[0]})"  # pyright: ignore
