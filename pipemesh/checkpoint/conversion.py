"""Checkpoints written tensor by tensor: under other names, in another dtype, or like another."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.checkpoint.files import check_name, step_in
from pipemesh.checkpoint.folder import LIST, list_for_tensorflow, publish
from pipemesh.checkpoint.manifest import SUFFIX, Manifest
from pipemesh.checkpoint.reader import contents, reason
from pipemesh.checkpoint.tensors import DATA, names_of, read_one
from pipemesh.errors import CheckpointError, SaveError
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


# Held at once.
_BYTES_AT_ONCE = 1 << 28


def write(
    path: str,
    tensors: Iterable[tuple[str, Callable[[], tf.Tensor]]],
    step: int,
    note: Mapping[str, Any],
) -> None:
    """Writes a checkpoint, whole or not at all.

    Args:
        path: of the checkpoint, without any ending; its folder is made if need be.
        tensors: names, and what gives the tensor of that name when its turn comes.
        step: for the manifest.
        note: for the manifest.

    Raises:
        CheckpointError: TensorFlow could not read it under that path.
        SaveError: it cannot be written; nothing is left of it.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "made", "ckpt")
        >>> write(path, [("w", lambda: tf.constant([1.0, 2.0]))], step=3, note={})
        >>> tf.train.load_checkpoint(path).get_tensor("w").tolist()
        [1.0, 2.0]
    """
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
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=parts[-1],
                    tensor_names=list(held),
                    shape_and_slices=[""] * len(held),
                    tensors=list(held.values()),
                )
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
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=merged, delete_old_dirs=False
        )
        Manifest.of(merged, step=step, note=note).write(merged)
        publish(merged, path)
    except (OSError, tf.errors.OpError) as error:
        raise SaveError(f"{path} cannot be written ({reason(error)})") from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
