"""A checkpoint written anew: under other names, in another dtype, or to be like another one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.checkpoint.folder import LIST, list_for_tensorflow
from pipemesh.checkpoint.manifest import SUFFIX, Manifest
from pipemesh.checkpoint.paths import step_in
from pipemesh.checkpoint.reader import contents
from pipemesh.checkpoint.tensors import DATA, names_of, read_one
from pipemesh.checkpoint.writer import write
from pipemesh.errors import CheckpointError
from pipemesh.text import nearest

# What TensorFlow and lingvo call it as well.
_STEP = "global_step"


class _Source(NamedTuple):
    """Where a tensor is read, and what it is to be."""

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
    """Writes tensors of a checkpoint anew, one after the other.

    Args:
        path: of the checkpoint, without any ending.
        to: path of the one to write.
        names: of the tensors to take along, and what each is called then.
        dtype: of floating tensors; None to leave them.
        like: path of a checkpoint that the new one is to be like: with its names, its floating
            dtypes and its manifest's note. What is missing is taken from there, and what is beyond
            it left out, if it is a single number or a place in data; of weights it is an error.

    Returns:
        A line that says what was written.

    Raises:
        CheckpointError: two get one name, the new one would not be like the other, or its name
            says another step.
        DamagedError: one cannot be read.
        SaveError: it cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write(folder + "/a", [("w", lambda: tf.constant([1.0, 2.0]))], step=3, note={})
        >>> told = convert(folder + "/a", folder + "/b", {"w": "lm/w"}, dtype="bfloat16")
        >>> {name: t.name for name, t in contents(folder + "/b")[1].items()}
        {'lm/w': 'bfloat16'}
    """
    sources = found = _renamed(path, names, dtype)
    if like:
        sources = _as_in(like, found, dtype)
    step, note = _about(path, sources.get(_STEP), step_in(to) or 0)
    if step_in(to) not in (None, step):
        raise CheckpointError(
            f"{to}: the checkpoint is of step {step}; give a path that ends in ckpt-{step}"
        )
    if like:
        _, note = _about(like)
    write(to, [(called, source.read) for called, source in sources.items()], step, note)
    _list_first(to)
    filled = [called for called in sources if called not in found]
    lost = sorted(found.keys() - sources.keys())
    return (
        f"{to}: {len(sources) - len(filled)} tensors of {path}"
        + (f", {_few(filled)} of {like}" if filled else "")
        + (f"; left out: {_few(lost)}" if lost else "")
    )


def _renamed(path: str, names: Mapping[str, str], dtype: str | None) -> dict[str, _Source]:
    """What is to be taken along, by new name."""
    shapes, dtypes = contents(path)
    found: dict[str, _Source] = {}
    for name, called in names.items():
        becomes = tf.as_dtype(dtype) if dtype and dtypes[name].is_floating else dtypes[name]
        source = _Source(path, name, shapes[name], dtypes[name], becomes)
        if found.setdefault(called, source) != source:
            raise CheckpointError(
                f"{found[called].name!r} and {name!r} would both be {called!r}; rename one"
            )
    return found


def _as_in(like: str, found: Mapping[str, _Source], dtype: str | None) -> dict[str, _Source]:
    """What makes a checkpoint like another one: what was found, and what that has besides."""
    shapes, dtypes = contents(like)
    sources: dict[str, _Source] = {}
    for called in names_of(like):
        shape, becomes = shapes[called], dtypes[called]
        source = found.get(called)
        if source is None:
            _check_is_no_weight(called, shape, like, found)
            source = _Source(like, called, shape, becomes, becomes)
        both_floating = source.dtype.is_floating and becomes.is_floating
        if source.shape != shape or (source.dtype != becomes and not both_floating):
            raise CheckpointError(
                f"{source.name!r} of {source.path} is {source.dtype.name}{source.shape}, but "
                f"{called!r} of {like} is {becomes.name}{shape}"
            )
        keeps = dtype is not None and source.path != like
        sources[called] = source if keeps else source._replace(becomes=becomes)
    for called, source in found.items():
        if called not in sources:
            _check_is_no_weight(called, source.shape, source.path, shapes)
    return sources


def _check_is_no_weight(
    called: str, shape: Sequence[int], path: str, others: Iterable[str]
) -> None:
    """Fails if what only one of two checkpoints has is more than a number or a place in data."""
    if shape and not called.startswith(DATA):
        near = nearest(called, others, cutoff=0.0)
        raise CheckpointError(
            f"only {path} has {called!r}, and {near!r} is the nearest that the other has; rename "
            "what is called otherwise, or leave out by a match what is not wanted"
        )


def _about(
    path: str, step: _Source | None = None, default: int = 0
) -> tuple[int, Mapping[str, Any]]:
    """Step and note of a checkpoint; of another program's, the step that a tensor says."""
    if os.path.exists(path + SUFFIX):
        manifest = Manifest.read(path)
        return manifest.step, manifest.note
    return (int(step.read()) if step else default), {}


def _list_first(path: str) -> None:
    """Lets `tf.train.latest_checkpoint` find it, unless the folder has a list already."""
    folder, name = os.path.split(path)
    if not os.path.exists(os.path.join(folder, LIST)):
        list_for_tensorflow(folder, [name])


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
