"""A tensor that lies in several variables, kept in checkpoints as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable.base import (
    VARIABLE_VALUE_KEY,  # pyright: ignore[reportAttributeAccessIssue]
    Trackable,
)
from tensorflow.python.training.saving import saveable_object_util

from pipemesh.backend.static_shape import static_sizes


@dataclasses.dataclass(frozen=True)
class Slice:
    """Which part of a whole tensor a variable has.

    Attributes:
        whole: sizes of the whole tensor.
        begin: for each dim where the part begins.
    """

    whole: tuple[int, ...]
    begin: tuple[int, ...]

    def spec(self, sizes: Sequence[int]) -> str:
        """As TensorFlow's checkpoints spell it, for a part of these sizes.

        Example:
            >>> Slice((4, 6), (0, 3)).spec([4, 3])
            '4 6 0,4:3,3'
        """
        parts = ":".join(f"{b},{s}" for b, s in zip(self.begin, sizes, strict=True))
        return f"{' '.join(map(str, self.whole))} {parts}"


# Where a variable keeps which slice it is.
_MARK = "_pipemesh_slice"


def mark_slice(variable: tf.Variable, name: str, part: Slice) -> None:
    """Notes on a variable that it is a slice.

    Args:
        variable: the slice.
        name: that the whole tensor would have as a single variable, without `:0`.
        part: which part of it the variable has.
    """
    setattr(variable, _MARK, (name, part))


def slice_of(variable: Any) -> tuple[str, Slice] | None:
    """What was noted on a variable: the name of the whole tensor, and which part it is.

    Returns:
        None for a variable that is no slice.
    """
    return getattr(variable, _MARK, None)


class SlicedVariable(Trackable):
    """Variables that have the parts of one tensor, to be tracked by a `tf.train.Checkpoint`.

    In a checkpoint they are one tensor, as if it were a single variable: each part is written from
    where it lies, and restored from whatever the tensor was cut into when it was written.

    Args:
        parts: each variable with the part that it has; together they make up the whole.

    Example:
        >>> import os, tempfile
        >>> halves = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
        >>> sliced = SlicedVariable([(v, Slice((4,), (2 * i,))) for i, v in enumerate(halves)])
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> path = tf.train.Checkpoint(x=sliced).write(path)
        >>> whole = tf.Variable(tf.zeros([4]))
        >>> _ = tf.train.Checkpoint(x=whole).read(path).assert_consumed()
        >>> whole.numpy().tolist()
        [1.0, 2.0, 3.0, 4.0]
    """

    def __init__(self, parts: Sequence[tuple[tf.Variable, Slice]]) -> None:
        self._parts = list(parts)

    @property
    def parts(self) -> list[tuple[tf.Variable, Slice]]:
        """Each variable with the part that it has."""
        return list(self._parts)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def saveables(name: str = "sliced") -> list[Any]:
            return [
                saveable_object_util.ResourceVariableSaveable(
                    variable, part.spec(static_sizes(variable)), name
                )
                for variable, part in self._parts
            ]

        return {VARIABLE_VALUE_KEY: saveables}
