"""State that checkpoints keep: slices of variables, optimizer slots, positions of iterators."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# It is private; TensorFlow's version is pinned to 2.21.
from tensorflow.python.eager import context
from tensorflow.python.trackable.base import (
    VARIABLE_VALUE_KEY,  # pyright: ignore[reportAttributeAccessIssue]
    Trackable,
)
from tensorflow.python.training.saving import saveable_object_util

from pipemesh.backend.static_shape import static_sizes


@dataclasses.dataclass(frozen=True)
class Slice:
    """The part of a whole tensor that a variable holds: sizes of the whole, and its begin."""

    whole: tuple[int, ...]
    begin: tuple[int, ...]

    def spec(self, sizes: Sequence[int]) -> str:
        """Returns the slice as TensorFlow's checkpoints spell it, such as `4 6 0,4:3,3`."""
        parts = ":".join(f"{b},{s}" for b, s in zip(self.begin, sizes, strict=True))
        return f"{' '.join(map(str, self.whole))} {parts}"


# An attribute of a variable: its slice.
_MARK = "_pipemesh_slice"


def mark_slice(variable: tf.Variable, name: str, part: Slice) -> None:
    """Notes on a variable that it holds a slice of the tensor `name` (without `:0`)."""
    setattr(variable, _MARK, (name, part))


def slice_of(variable: Any) -> tuple[str, Slice] | None:
    """Returns the whole tensor's name and the slice of it that a variable holds, or None."""
    return getattr(variable, _MARK, None)


class SlicedVariable(Trackable):
    """Variables that hold the parts of one tensor, tracked by a `tf.train.Checkpoint`."""

    # In a checkpoint they are one tensor, as of a single variable: each part is written from its
    # device, and restored however the tensor was cut when it was written.

    def __init__(self, parts: Sequence[tuple[tf.Variable, Slice]]) -> None:
        self.parts = list(parts)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def saveables(name: str = "sliced") -> list[Any]:
            return [
                saveable_object_util.ResourceVariableSaveable(
                    variable, part.spec(static_sizes(variable)), name
                )
                for variable, part in self.parts
            ]

        return {VARIABLE_VALUE_KEY: saveables}


def create_slots(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Creates the slot variables of a TF1 optimizer now instead of at the first update."""
    # Their names then do not depend on the number of models that this process has made before.
    for root in sorted({variable.name.split(":")[0].split("/")[0] for variable in variables}):
        # Leaving a scope resets the names that are taken below it.
        with tf.compat.v1.variable_scope(root) as scope:
            assert scope.name == root
    optimizer._create_slots(variables)


# State outside the iterator cannot be saved.
_FAIL_ON_EXTERNAL_STATE = 2


def iterator_state(iterator: Any) -> tf.Tensor:
    """Returns the position of an eager iterator, as variants that `SaveV2` writes."""
    # Raises a `tf.errors.OpError` if the dataset has state that cannot be saved.
    # A worker answers before it has done it, and an error would come with a later operation: the
    # shape waits for it, in an executor of its own.
    with context.execution_mode(context.SYNC), tf.device(device_of_iterator(iterator)):
        state = tf.raw_ops.SerializeIterator(
            resource_handle=iterator._iterator_resource,
            external_state_policy=_FAIL_ON_EXTERNAL_STATE,
        )
        _ = state.shape
    return state


def set_iterator_state(iterator: Any, state: tf.Tensor) -> None:
    """Moves an iterator to a position that `iterator_state` returned for an equal dataset."""
    # Raises a `tf.errors.OpError` if the position is that of another dataset.
    with context.execution_mode(context.SYNC), tf.device(device_of_iterator(iterator)):
        tf.raw_ops.DeserializeIterator(
            resource_handle=iterator._iterator_resource, serialized=state
        )
        # It has no result to wait for; this waits.
        iterator_state(iterator)


def device_of_iterator(iterator: Any) -> str:
    """Returns the device on which an eager iterator reads its dataset."""
    return iterator._iterator_resource.device


def is_iterator(value: Any) -> bool:
    """Returns whether a value is an iterator over a dataset."""
    return hasattr(value, "_iterator_resource")
