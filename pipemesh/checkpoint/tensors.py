"""The tensors of a checkpoint one by one: listed, verified, compared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from pipemesh.checkpoint.reader import contents, read_tensors
from pipemesh.errors import CheckpointError
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
    return [
        name
        for name in _names(path, shapes, wanted)
        if (state or not _is_state(name, shapes)) and (places or not name.startswith(DATA))
    ]


def _differing(name: str, one: tf.Tensor, two: tf.Tensor) -> Iterator[tuple[str, ...]]:
    if one.dtype == tf.string or not one.dtype.is_numeric:
        if not bool(tf.reduce_all(one == two)):
            yield name, "", "", "other content"
        return
    one, two = tf.cast(one, tf.float64), tf.cast(two, tf.float64)
    apart = tf.abs(one - two)
    same = bool(tf.reduce_all(tf.equal(one, two)))
    if not same:
        norm = float(tf.norm(one))
        share = float(tf.norm(one - two)) / norm if norm else math.inf
        yield name, f"{float(tf.reduce_max(apart)):.3g}", f"{share:.3g}", ""


def _is_state(name: str, shapes: dict[str, list[int]]) -> bool:
    """Returns whether a name is an optimizer's: its prefix is the name of a weight."""
    return name.rpartition("/")[0] in shapes or _POWERS.fullmatch(name) is not None


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
