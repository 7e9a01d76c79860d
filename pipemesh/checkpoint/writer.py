"""A checkpoint written tensor by tensor, by somebody who has them all and no variables."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from pipemesh.checkpoint.folder import publish
from pipemesh.checkpoint.manifest import Manifest
from pipemesh.checkpoint.paths import check_name
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import SaveError

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
