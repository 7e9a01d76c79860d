"""The tensors of a checkpoint one by one: listed, verified, compared, written anew."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from pipemesh.checkpoint.manifest import SUFFIX, Manifest
from pipemesh.checkpoint.reader import contents, read_tensors
from pipemesh.checkpoint.writer import write
from pipemesh.errors import CheckpointError
from pipemesh.partition.text import bytes_text
from pipemesh.text import columns, nearest

# Numbers of an optimizer that belong to no weight.
_POWERS = re.compile(r"beta[12]_power")
_DATA = "data/"
_MARK = "_CHECKPOINTABLE_OBJECT_GRAPH"


def listing(path: str, wanted: Callable[[str], bool]) -> list[str]:
    """Lines of a table of names, shapes, dtypes and bytes, and their sums.

    Args:
        path: of the checkpoint.
        wanted: which names to list.

    Raises:
        CheckpointError: no name is wanted.
        DamagedError: the index cannot be read.
    """
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
    """Reads all tensors, which checks their checksums; says how many there are.

    Raises:
        DamagedError: one is not what was written.
    """
    _, dtypes = contents(path)
    for name in dtypes:
        _read(path, name, dtypes[name])
    return f"all {len(dtypes)} tensors are what was written"


def diff(path: str, other: str, wanted: Callable[[str], bool]) -> tuple[list[str], bool]:
    """What two checkpoints have otherwise.

    Args:
        path: of the one.
        other: of the other.
        wanted: which names to compare.

    Returns:
        Lines to show, and whether anything differs.

    Raises:
        CheckpointError: no name is wanted.
        DamagedError: one cannot be read.
    """
    (shapes, dtypes), (other_shapes, other_dtypes) = contents(path), contents(other)
    names = _names(path, {**shapes, **other_shapes}, wanted)
    rows: list[tuple[str, ...]] = []
    for name in names:
        if name not in shapes or name not in other_shapes:
            rows.append((name, "", "", f"only in {path if name in shapes else other}"))
            continue
        here, there = dtypes[name], other_dtypes[name]
        if shapes[name] != other_shapes[name] or (
            not here.is_compatible_with(there) and not (here.is_floating and there.is_floating)
        ):
            what = f"{here.name}{shapes[name]} and {there.name}{other_shapes[name]}"
            rows.append((name, "", "", what))
        elif here == tf.variant:
            continue
        else:
            rows += _differing(name, _read(path, name, here), _read(other, name, there))
    if not rows:
        return [f"the same: {len(names)} tensors"], False
    head = ("name", "greatest difference", "of the norm", "")
    return [
        *columns([head, *rows], left=(0, 3)),
        f"{len(rows)} of {len(names)} tensors differ",
    ], True


def convert(
    path: str,
    to: str,
    wanted: Callable[[str], bool],
    renamed: Callable[[str], str],
    dtype: str | None = None,
    weights_only: bool = False,
) -> str:
    """Writes tensors anew, one after the other.

    Args:
        path: of the checkpoint.
        to: path of the one to write.
        wanted: which names to take along.
        renamed: what they are called then.
        dtype: of floating tensors; None to leave them.
        weights_only: whether to leave out the optimizer's state and places in data.

    Returns:
        A line that says what was written.

    Raises:
        CheckpointError: no name is wanted, or two get one name.
        DamagedError: it cannot be read.
        SaveError: it cannot be written.
    """
    shapes, dtypes = contents(path)
    names = _names(path, shapes, wanted)
    if weights_only:
        names = [n for n in names if not _is_state(n, shapes) and not n.startswith(_DATA)]
    new = {name: renamed(name) for name in names}
    old: dict[str, str] = {}
    for name, called in new.items():
        if old.setdefault(called, name) != name:
            raise CheckpointError(
                f"{old[called]!r} and {name!r} would both be {called!r}; rename one"
            )

    def converted(name: str) -> tf.Tensor:
        value = _read(path, name, dtypes[name])
        return tf.cast(value, dtype) if dtype and value.dtype.is_floating else value

    step, note = 0, {}
    if os.path.exists(path + SUFFIX):
        manifest = Manifest.read(path)
        step, note = manifest.step, manifest.note
    write(to, [(new[name], lambda name=name: converted(name)) for name in names], step, note)
    return f"{to}: {len(names)} tensors of {path}"


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
    """Whether it is an optimizer's: its name stands behind that of a weight."""
    return name.rpartition("/")[0] in shapes or _POWERS.fullmatch(name) is not None


def _names(path: str, shapes: dict[str, list[int]], wanted: Callable[[str], bool]) -> list[str]:
    # TensorFlow's graph of Python objects is a tensor, too, but nobody's value.
    names = sorted(name for name in shapes if name != _MARK and wanted(name))
    if not names:
        raise CheckpointError(
            f"{path} has no tensor of such a name; it has {len(shapes)}, such as "
            f"{nearest('', shapes, cutoff=0.0)!r}"
        )
    return names


def _read(path: str, name: str, dtype: tf.DType) -> tf.Tensor:
    (value,) = read_tensors(path, [name], [""], [dtype])
    return value
