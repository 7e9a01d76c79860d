"""Checkpoints tensor by tensor: listed, compared, or written under other names or dtypes."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.checkpoint.files import check_name, step_in
from pipemesh.checkpoint.folder import LIST, list_for_tensorflow, publish
from pipemesh.checkpoint.manifest import SUFFIX, Manifest
from pipemesh.checkpoint.reader import contents, read_tensors, reason
from pipemesh.checkpoint.slices import join_files, write_tensors
from pipemesh.errors import CheckpointError, SaveError
from pipemesh.text import bytes_text, columns, nearest

# An optimizer's numbers that belong to no weight.
_POWERS = re.compile(r"beta[12]_power")
DATA = "data/"
_MARK = "_CHECKPOINTABLE_OBJECT_GRAPH"


def listing(path: str, wanted: Callable[[str], bool]) -> list[str]:
    """Returns lines of a table of names, shapes, dtypes and bytes, and their totals."""
    shapes, dtypes = contents(path)
    rows = [("name", "shape", "dtype", "bytes")]
    numbers = bytes_in_all = 0
    for name in _names(path, shapes, wanted):
        shape, dtype = shapes[name], dtypes[name]
        count = 0 if dtype in (tf.variant, tf.string) else math.prod(shape)
        numbers, bytes_in_all = numbers + count, bytes_in_all + count * dtype.size
        size = f"{count * dtype.size:,}" if count else ""
        rows.append((name, "x".join(map(str, shape)) or "scalar", dtype.name, size))
    return [
        *columns(rows, left=(0, 1, 2)),
        f"{len(rows) - 1} tensors, {numbers:,} numbers, {bytes_text(bytes_in_all)}",
    ]


def verify(path: str) -> str:
    """Reads all tensors, which checks their checksums, and returns a line with their number."""
    _, dtypes = contents(path)
    for name in dtypes:
        read_one(path, name, dtypes[name])
    return f"all {len(dtypes)} tensors are intact"


def diff(path: str, other: str, wanted: Callable[[str], bool]) -> tuple[list[str], bool]:
    """Returns lines with the differences of two checkpoints, and whether there are any."""
    (shapes, dtypes), (other_shapes, other_dtypes) = contents(path), contents(other)
    names = _names(path, {**shapes, **other_shapes}, wanted)
    rows: list[tuple[str, ...]] = []
    for name in names:
        if name not in shapes or name not in other_shapes:
            rows.append((name, "", "", f"only in {path if name in shapes else other}"))
            continue
        dtype, other_dtype = dtypes[name], other_dtypes[name]
        both_floating = dtype.is_floating and other_dtype.is_floating
        if shapes[name] != other_shapes[name] or (
            not dtype.is_compatible_with(other_dtype) and not both_floating
        ):
            types = f"{dtype.name}{shapes[name]} and {other_dtype.name}{other_shapes[name]}"
            rows.append((name, "", "", types))
        elif dtype != tf.variant:
            one = read_one(path, name, dtype)
            rows += _differing(name, one, read_one(other, name, other_dtype))
    if not rows:
        return [f"the same: {len(names)} tensors"], False
    head = ("name", "greatest difference", "of the norm", "")
    return [
        *columns([head, *rows], left=(0, 3)),
        f"{len(rows)} of {len(names)} tensors differ",
    ], True


def names_of(
    path: str,
    wanted: Callable[[str], bool] = lambda _: True,
    *,
    state: bool = True,
    places: bool = True,
) -> list[str]:
    """Returns names of tensors, with or without optimizer state and positions in data."""
    shapes, _ = contents(path)
    names = _names(path, shapes, wanted)
    if not state:
        # The prefix of an optimizer's tensor is the name of a weight.
        names = [
            n for n in names if n.rpartition("/")[0] not in shapes and not _POWERS.fullmatch(n)
        ]
    return names if places else [name for name in names if not name.startswith(DATA)]


def _differing(name: str, one: tf.Tensor, two: tf.Tensor) -> Iterator[tuple[str, ...]]:
    if one.dtype == tf.string or not one.dtype.is_numeric:
        if not bool(tf.reduce_all(one == two)):
            yield name, "", "", "other content"
        return
    one, two = tf.cast(one, tf.float64), tf.cast(two, tf.float64)
    if not bool(tf.reduce_all(one == two)):
        norm, greatest = float(tf.norm(one)), float(tf.reduce_max(tf.abs(one - two)))
        share = float(tf.norm(one - two)) / norm if norm else math.inf
        yield name, f"{greatest:.3g}", f"{share:.3g}", ""


def _names(path: str, shapes: dict[str, list[int]], wanted: Callable[[str], bool]) -> list[str]:
    # TensorFlow's graph of Python objects is a tensor, too, but not a value.
    names = sorted(name for name in shapes if name != _MARK and wanted(name))
    if not names:
        raise CheckpointError(
            f"{path} has no tensor of such a name; it has {len(shapes)}, such as "
            f"{nearest('', shapes, cutoff=0.0)!r}"
        )
    return names


def read_one(path: str, name: str, dtype: tf.DType) -> tf.Tensor:
    """Reads a whole tensor, however it was sliced when it was written."""
    (value,) = read_tensors(path, [name], [""], [dtype])
    return value


# Also TensorFlow's and lingvo's name.
_STEP = "global_step"


class _Source(NamedTuple):
    """A tensor to read, and the dtype that it gets."""

    path: str
    name: str
    shape: Sequence[int]
    dtype: tf.DType
    becomes: tf.DType

    def read(self) -> tf.Tensor:
        value = read_one(self.path, self.name, self.dtype)
        return value if self.dtype == self.becomes else tf.cast(value, self.becomes)


def convert(
    path: str,
    to: str,
    names: Mapping[str, str],
    dtype: str | None = None,
    like: str | None = None,
) -> str:
    """Writes tensors of a checkpoint to a new one, one after the other.

    Args:
        path: the checkpoint to read, without any file ending.
        to: the path of the checkpoint to write.
        names: the tensors to copy, with the new name of each.
        dtype: the new dtype of floating tensors; None keeps their dtypes.
        like: a checkpoint whose names, floating dtypes and note the new one gets. Single numbers
            and positions in data that are missing come from there, superfluous ones are left out;
            for a weight either is an error.

    Returns:
        A line that says what was written.

    Raises:
        CheckpointError: two tensors get one name, the new checkpoint would differ from `like`, or
            its name contains another step.
        DamagedError: a checkpoint cannot be read.
        SaveError: the new one cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write(folder + "/a", [("w", lambda: tf.constant([1.0, 2.0]))], step=3, note={})
        >>> line = convert(folder + "/a", folder + "/b", {"w": "lm/w"}, dtype="bfloat16")
        >>> {name: t.name for name, t in contents(folder + "/b")[1].items()}
        {'lm/w': 'bfloat16'}
    """
    sources = renamed = _renamed(path, names, dtype)
    if like:
        sources = _as_in(like, renamed, dtype)
    step, note = _about(path, sources.get(_STEP), step_in(to) or 0)
    if step_in(to) not in (None, step):
        raise CheckpointError(
            f"{to}: the checkpoint is of step {step}; give a path that ends in ckpt-{step}"
        )
    if like:
        _, note = _about(like)
    write(to, [(called, source.read) for called, source in sources.items()], step, note)
    folder, name = os.path.split(to)
    if not os.path.exists(os.path.join(folder, LIST)):
        list_for_tensorflow(folder, [name])
    filled = [called for called in sources if called not in renamed]
    lost = sorted(renamed.keys() - sources.keys())
    return (
        f"{to}: {len(sources) - len(filled)} tensors of {path}"
        + (f", {_few(filled)} of {like}" if filled else "")
        + (f"; left out: {_few(lost)}" if lost else "")
    )


def _renamed(path: str, names: Mapping[str, str], dtype: str | None) -> dict[str, _Source]:
    """Returns the tensors to copy, by new name."""
    shapes, dtypes = contents(path)
    sources: dict[str, _Source] = {}
    for name, called in names.items():
        becomes = tf.as_dtype(dtype) if dtype and dtypes[name].is_floating else dtypes[name]
        source = _Source(path, name, shapes[name], dtypes[name], becomes)
        if sources.setdefault(called, source) != source:
            raise CheckpointError(
                f"{sources[called].name!r} and {name!r} would both be {called!r}; rename one"
            )
    return sources


def _as_in(like: str, renamed: Mapping[str, _Source], dtype: str | None) -> dict[str, _Source]:
    """Returns the tensors of a checkpoint like another one, with missing ones from there."""
    shapes, dtypes = contents(like)
    sources: dict[str, _Source] = {}
    for called in names_of(like):
        shape, becomes = shapes[called], dtypes[called]
        source = renamed.get(called)
        if source is None:
            _check_is_no_weight(called, shape, like, renamed)
            source = _Source(like, called, shape, becomes, becomes)
        both_floating = source.dtype.is_floating and becomes.is_floating
        if source.shape != shape or (source.dtype != becomes and not both_floating):
            raise CheckpointError(
                f"{source.name!r} of {source.path} is {source.dtype.name}{source.shape}, but "
                f"{called!r} of {like} is {becomes.name}{shape}"
            )
        keeps = dtype is not None and source.path != like
        sources[called] = source if keeps else source._replace(becomes=becomes)
    for called, source in renamed.items():
        if called not in sources:
            _check_is_no_weight(called, source.shape, source.path, shapes)
    return sources


def _check_is_no_weight(
    called: str, shape: Sequence[int], path: str, others: Iterable[str]
) -> None:
    """Raises an error for a weight that only one of two checkpoints has."""
    if shape and not called.startswith(DATA):
        near = nearest(called, others, cutoff=0.0)
        raise CheckpointError(
            f"only {path} has {called!r}; the nearest name in the other is {near!r}. Rename it, or "
            "leave it out by --match"
        )


def _about(
    path: str, step: _Source | None = None, default: int = 0
) -> tuple[int, Mapping[str, Any]]:
    """Returns step and note of a checkpoint; another program's step comes from a tensor."""
    if os.path.exists(path + SUFFIX):
        manifest = Manifest.read(path)
        return manifest.step, manifest.note
    return (int(step.read()) if step else default), {}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Smaller tensors are held until they are so large together, and written into one file.
_BYTES_AT_ONCE = 1 << 22


def write(
    path: str,
    tensors: Iterable[tuple[str, Callable[[], tf.Tensor]]],
    step: int,
    note: Mapping[str, Any],
) -> None:
    """Writes a checkpoint tensor by tensor, whole or not at all."""
    # `tensors` are names, each with a function that returns the tensor when its turn comes. Creates
    # the folder if necessary. Raises a CheckpointError if TensorFlow could not read that path, and
    # a SaveError, with nothing left, if it cannot be written.
    check_name(path)
    folder, name = os.path.split(path)
    temporary = None
    try:
        os.makedirs(folder or ".", exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=f".{name}_temp", dir=folder or ".")
        merged = os.path.join(temporary, name)
        parts: list[str] = []
        held: dict[str, tf.Tensor] = {}

        def flush() -> None:
            parts.append(os.path.join(temporary, f"part-{len(parts)}"))
            write_tensors("CPU:0", parts[-1], list(held), [""] * len(held), list(held.values()))
            held.clear()

        bytes_held = 0
        for called, get in tensors:
            held[called] = get()
            bytes_held += held[called].dtype.size * (held[called].shape.num_elements() or 0)
            if bytes_held >= _BYTES_AT_ONCE:
                flush()
                bytes_held = 0
        if held or not parts:
            flush()
        join_files("CPU:0", parts, merged)
        Manifest.of(merged, step=step, note=note).write(merged)
        publish(merged, path)
    except (OSError, tf.errors.OpError) as error:
        raise SaveError(f"{path} cannot be written ({reason(error)})") from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
