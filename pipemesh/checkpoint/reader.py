"""Variables get what a checkpoint has under their names, whatever it was cut into."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from pipemesh.backend.cluster import own_host
from pipemesh.checkpoint.entries import Entry, Part, chunks, entries_of
from pipemesh.checkpoint.files import literal
from pipemesh.checkpoint.workers import absolute, readers, say_once
from pipemesh.errors import CheckpointError, DamagedError
from pipemesh.text import nearest

# Read at once: enough for all threads, and far below what a model has.
_BYTES_AT_ONCE = 1 << 28
# What says nothing of the files.
_NO_DAMAGE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnavailableError,
)
# What tf.data puts before the error of a function of ours.
_OF_A_FUNCTION = re.compile(
    r"^Error in user-defined function passed to \S+ transformation with iterator: \S+ (\w+Error: )?"
)
# What TensorFlow puts before the error of a graph, and behind that of another process.
_OF_A_GRAPH = re.compile(r"Graph execution error|Detected at node|  File |\d+ root error|\s*$")
_OF_A_WORKER = re.compile(r"from remote target /job:worker/replica:0/task:(\d+)/")


def restore(path: str, tracked: Mapping[str, Any]) -> list[str]:
    """Restores variables, slices of variables and iterators, each from where its slice lies.

    Floating values get the dtype of the variable. Nothing is assigned unless all names are there,
    with the right shapes.

    Args:
        path: of the checkpoint, without any ending: of this library, of TensorFlow's own `Saver`,
            or of lingvo.
        tracked: by name what gets a value; as `entries_of`.

    Returns:
        The names of what the checkpoint has besides.

    Raises:
        CheckpointError: a name is missing, or has another shape or kind of number.
        DamagedError: the checkpoint is not what was written; variables may have got some of it.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> path = tf.compat.v1.train.Saver({"w": tf.Variable([1.0, 2.0])}).save(None, path)
        >>> w = tf.Variable([0.0, 0.0], dtype=tf.bfloat16)
        >>> restore(path, {"w": w})
        []
        >>> tf.cast(w, tf.float32).numpy().tolist()
        [1.0, 2.0]
    """
    shapes, dtypes = contents(path)
    entries = entries_of(tracked)
    for entry in entries:
        _check(path, entry, shapes, dtypes)
    parts = [(entry, part) for entry in entries for part in entry.parts]
    there = readers(path, [part.host for _, part in parts])
    by_host: dict[str, list[tuple[Entry, Part]]] = {}
    for entry, part in parts:
        host = part.host if part.host in there else own_host()
        by_host.setdefault(host, []).append((entry, part))
    own = by_host.pop(own_host(), [])
    # Hosts read at the same time, each what lies on it.
    with ThreadPoolExecutor(len(by_host) or None) as pool:
        begun = [pool.submit(_restore, path, *of_host, dtypes) for of_host in by_host.items()]
        _restore(path, own_host(), own, dtypes)
        for each in begun:
            each.result()
    return sorted(set(shapes) - {entry.name for entry in entries})


def _restore(
    path: str,
    host: str,
    parts: Sequence[tuple[Entry, Part]],
    dtypes: Mapping[str, tf.DType],
) -> None:
    """A host reads what parts are to have, and they get it."""
    for group in chunks(parts, _BYTES_AT_ONCE):
        wanted = (
            [entry.name for entry, _ in group],
            [part.spec for _, part in group],
            [dtypes[entry.name] for entry, _ in group],
        )
        try:
            values = read_tensors(path, *wanted, host=host)
        except DamagedError as error:
            if host == own_host():
                raise
            # It is damaged if this process says so, too.
            values = read_tensors(path, *wanted)
            say_once("reads", path, host, f"cannot read it ({error})")
        for (entry, part), value in zip(group, values, strict=True):
            _assign(path, entry, part, value)


def _assign(path: str, entry: Entry, part: Part, value: tf.Tensor) -> None:
    try:
        with tf.device(part.host):
            if value.dtype != entry.dtype:
                value = tf.cast(value, entry.dtype)
        part.assign(value)
    except tf.errors.OpError as error:
        if entry.dtype != tf.variant:
            raise
        # The value is whole, so it is the iterator that cannot be set.
        raise CheckpointError(
            f"{path}: {entry.name!r} is a place in another dataset ({reason(error)})"
        ) from error


def read_tensors(
    path: str,
    names: Sequence[str],
    specs: Sequence[str],
    dtypes: Sequence[tf.DType],
    host: str | None = None,
) -> list[tf.Tensor]:
    """Reads tensors, or slices of them, which checks their checksums.

    Args:
        path: of the checkpoint.
        names: of the tensors.
        specs: which slices, as TensorFlow's checkpoints spell them; "" for all.
        dtypes: that they have there.
        host: which process reads, as `host_of` names it, and has them then; by default this one.

    Raises:
        DamagedError: one is not what was written.
        CheckpointError: it cannot be read now.
    """
    host = host or own_host()
    with literal(path) if host == own_host() else contextlib.nullcontext(path) as prefix:
        try:
            with tf.device(host):
                found = tf.raw_ops.RestoreV2(
                    prefix=absolute(prefix, host),
                    tensor_names=names,
                    shape_and_slices=specs,
                    dtypes=dtypes,
                )
            for tensor in found:
                # Asking for something waits for another process, and raises its error.
                _ = tensor.shape
            return found
        except tf.errors.OpError as error:
            raise unreadable(path, error, prefix) from error


def contents(path: str) -> tuple[dict[str, list[int]], dict[str, tf.DType]]:
    """The shapes and dtypes of a checkpoint's tensors, by name.

    Raises:
        DamagedError: its index cannot be read.
    """
    with literal(path) as prefix:
        try:
            reader: Any = tf.train.load_checkpoint(prefix)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise unreadable(path, error, prefix) from error
    return reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()


def _check(
    path: str,
    entry: Entry,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, tf.DType],
) -> None:
    if entry.name not in shapes:
        near = nearest(entry.name, shapes)
        hint = f"; the nearest that it has is {near!r}" if near else ""
        raise CheckpointError(f"{path} has no {entry.name!r}{hint}")
    found = tuple(shapes[entry.name])
    if entry.shape is not None and found != entry.shape:
        raise CheckpointError(
            f"{path}: {entry.name!r} has shape {list(found)} there, {list(entry.shape)} here"
        )
    there, here = dtypes[entry.name], entry.dtype
    if there != here and not (there.is_floating and here.is_floating):
        raise CheckpointError(
            f"{path}: {entry.name!r} is {there.name} there, {here.name} here; only floating "
            "numbers become others"
        )


def unreadable(path: str, error: Exception, prefix: str = "") -> CheckpointError:
    """What an error says that came while a checkpoint was read.

    Args:
        path: of the checkpoint.
        error: of TensorFlow.
        prefix: the path that TensorFlow was given, if it was another.

    Returns:
        A `DamagedError` if the files are not what was written; not where memory, a file system or a
        permission was missing, which may be there the next time.
    """
    what = reason(error).replace(prefix or path, path)
    if isinstance(error, _NO_DAMAGE):
        return CheckpointError(f"{path} cannot be read ({what})")
    shard = re.search(r"shard (\d+)", what)
    files = f"{path}.data-{int(shard[1]):05d}-*" if shard else f"{path}.*"
    return DamagedError(path, f"{files} cannot be read ({what})")


def reason(error: BaseException) -> str:
    """What happened, in one line, without what TensorFlow was doing."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        text = error.message  # pyright: ignore[reportAttributeAccessIssue]
    lines = (line for line in text.splitlines() if not _OF_A_GRAPH.match(line))
    first = next(lines, type(error).__name__).strip()
    told = _OF_A_FUNCTION.sub("", first.split("}} ")[-1].split(" [Op:")[0])
    worker = _OF_A_WORKER.search(text)
    return f"worker {worker[1]}: {told}" if worker else told
