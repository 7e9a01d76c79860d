"""Restoring: variables get the values of their names, however these were cut."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from pipemesh.backend.cluster import own_host
from pipemesh.checkpoint.files import literal
from pipemesh.checkpoint.slices import Entry, Part, absolute, chunks, entries_of, readers, say_once
from pipemesh.errors import CheckpointError, DamagedError
from pipemesh.text import nearest

# Enough for all threads, and far smaller than a model.
_BYTES_AT_ONCE = 1 << 28
# Errors that are no sign of damaged files.
_NO_DAMAGE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnavailableError,
)
# The prefix of tf.data for an error of a user-defined function.
_FUNCTION_PREFIX = re.compile(
    r"^Error in user-defined function passed to \S+ transformation with iterator: \S+ (\w+Error: )?"
)
# TensorFlow's prefix for an error of a graph, and its suffix for one of another process.
_GRAPH_LINE = re.compile(r"Graph execution error|Detected at node|  File |\d+ root error|\s*$")
_WORKER = re.compile(r"from remote target /job:worker/replica:0/task:(\d+)/")


def restore(path: str, tracked: Mapping[str, Any]) -> list[str]:
    """Restores variables, slices of variables and iterators, each on its host.

    Floating values get the dtype of the variable. Nothing is assigned unless all names exist with
    the right shapes.

    Args:
        path: the checkpoint, without any file ending: of this library, of TensorFlow's own `Saver`,
            or of lingvo.
        tracked: by name a `tf.Variable`, a `SlicedVariable` or an iterator over a dataset.

    Returns:
        The names of the checkpoint's other values.

    Raises:
        CheckpointError: a name is missing, or has another shape or kind of number.
        DamagedError: the checkpoint is damaged; some variables may already have new values.

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
    able = readers(path, [part.host for _, part in parts])
    by_host: dict[str, list[tuple[Entry, Part]]] = {}
    for entry, part in parts:
        host = part.host if part.host in able else own_host()
        by_host.setdefault(host, []).append((entry, part))
    local = by_host.pop(own_host(), [])
    # Hosts read at the same time, each its own parts.
    with ThreadPoolExecutor(len(by_host) or None) as pool:
        futures = [pool.submit(_restore, path, *item, dtypes) for item in by_host.items()]
        _restore(path, own_host(), local, dtypes)
        for future in futures:
            future.result()
    return sorted(set(shapes) - {entry.name for entry in entries})


def _restore(
    path: str,
    host: str,
    parts: Sequence[tuple[Entry, Part]],
    dtypes: Mapping[str, tf.DType],
) -> None:
    """Reads the values of some parts on a host and assigns them."""
    for group in chunks(parts, _BYTES_AT_ONCE):
        request = (
            [entry.name for entry, _ in group],
            [part.spec for _, part in group],
            [dtypes[entry.name] for entry, _ in group],
        )
        try:
            values = read_tensors(path, *request, host=host)
        except DamagedError as error:
            if host == own_host():
                raise
            # It is only damaged if this process cannot read it, either.
            values = read_tensors(path, *request)
            say_once("reads", path, host, f"cannot read it ({error})")
        for (entry, part), value in zip(group, values, strict=True):
            _assign(path, entry, part, value)
    if parts and host != own_host():
        # A worker answers before it has assigned; the shape waits for a value that it reads then,
        # so that no step reads the old values.
        _ = parts[-1][1].read(host).shape


def _assign(path: str, entry: Entry, part: Part, value: tf.Tensor) -> None:
    try:
        with tf.device(part.host):
            if value.dtype != entry.dtype:
                value = tf.cast(value, entry.dtype)
        part.assign(value)
    except tf.errors.OpError as error:
        if entry.dtype != tf.variant:
            raise
        # The value was read, so the iterator cannot be set.
        raise CheckpointError(
            f"{path}: {entry.name!r} is a position in another dataset ({reason(error)})"
        ) from error


def read_tensors(
    path: str,
    names: Sequence[str],
    specs: Sequence[str],
    dtypes: Sequence[tf.DType],
    host: str | None = None,
) -> list[tf.Tensor]:
    """Reads tensors, or slices of them, on a host, which checks their checksums."""
    # The values stay on the host, by default this process. Raises a DamagedError for changed files,
    # a CheckpointError if they cannot be read now.
    host = host or own_host()
    with literal(path) if host == own_host() else contextlib.nullcontext(path) as prefix:
        try:
            with tf.device(host):
                tensors = tf.raw_ops.RestoreV2(
                    prefix=absolute(prefix, host),
                    tensor_names=names,
                    shape_and_slices=specs,
                    dtypes=dtypes,
                )
            for tensor in tensors:
                # The shape waits for another process, and raises its error.
                _ = tensor.shape
            return tensors
        except tf.errors.OpError as error:
            raise unreadable(path, error, prefix) from error


def contents(path: str) -> tuple[dict[str, list[int]], dict[str, tf.DType]]:
    """Returns the shapes and dtypes of a checkpoint's tensors, by name.

    Args:
        path: the checkpoint, without any file ending.

    Raises:
        DamagedError: its index cannot be read.

    Example:
        >>> import tempfile
        >>> from pipemesh.checkpoint import Checkpoints
        >>> path = Checkpoints(tempfile.mkdtemp(), {"w": tf.Variable([1.0, 2.0])}).save(1, {})
        >>> contents(path)[0]
        {'w': [2]}
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
        hint = f"; the nearest name that it has is {near!r}" if near else ""
        raise CheckpointError(f"{path} has no {entry.name!r}{hint}")
    shape = tuple(shapes[entry.name])
    if entry.shape is not None and shape != entry.shape:
        raise CheckpointError(
            f"{path}: {entry.name!r} has shape {list(shape)} in the checkpoint, but the model "
            f"needs {list(entry.shape)}; restore it into a model of the same sizes"
        )
    saved, needed = dtypes[entry.name], entry.dtype
    if saved != needed and not (saved.is_floating and needed.is_floating):
        raise CheckpointError(
            f"{path}: {entry.name!r} is {saved.name} in the checkpoint, but the model needs "
            f"{needed.name}; only floating dtypes are converted"
        )


def unreadable(path: str, error: Exception, prefix: str = "") -> CheckpointError:
    """Converts an error of reading a checkpoint to a DamagedError or a CheckpointError."""
    # It is no damage if memory, a file system or a permission was missing, which may exist the next
    # time. `prefix` is the path that TensorFlow got instead of `path`.
    cause = reason(error).replace(prefix or path, path)
    if isinstance(error, _NO_DAMAGE):
        return CheckpointError(f"{path} cannot be read ({cause})")
    shard = re.search(r"shard (\d+)", cause)
    files = f"{path}.data-{int(shard[1]):05d}-*" if shard else f"{path}.*"
    return DamagedError(path, f"{files} cannot be read ({cause})")


def reason(error: BaseException) -> str:
    """Returns the cause of an error in one line, without TensorFlow's context."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        text = error.message  # pyright: ignore[reportAttributeAccessIssue]
    lines = (line for line in text.splitlines() if not _GRAPH_LINE.match(line))
    first = next(lines, type(error).__name__).strip()
    message = _FUNCTION_PREFIX.sub("", first.split("}} ")[-1].split(" [Op:")[0])
    worker = _WORKER.search(text)
    return f"worker {worker[1]}: {message}" if worker else message
