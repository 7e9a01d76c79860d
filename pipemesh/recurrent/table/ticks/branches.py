"""Values of which some actions make others, where the step says which action is performed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend.operations import merge, switch, switch_to
from pipemesh.recurrent.passes.part import Grads

# Gives for a place of a home the boolean, or the number, that is there.
Predicate = Callable[[int], tf.Tensor]
Number = Callable[[int], tf.Tensor]


class Branching:
    """A list of tensors on its way through actions, of which at most one is performed.

    TensorFlow's own conditionals take all that any branch uses through each branch, and lie on one
    device. Here each tensor is switched on its own device, for those actions that use it.

    Args:
        tensors: the values before; None stays None.
        devices: of each.
        places: the number of each one's device in its home.
    """

    def __init__(
        self, tensors: Sequence[tf.Tensor | None], devices: Sequence[str], places: Sequence[int]
    ) -> None:
        self._rest: Grads = list(tensors)
        self._devices = devices
        self._places = places
        self._shapes = [None if t is None else t.shape for t in tensors]
        self._results: list[Grads] = []

    def enter(self, predicate: Predicate) -> Grads:
        """The values for one action, there only if the predicate holds."""
        taken: Grads = [None] * len(self._rest)
        for i, tensor in enumerate(self._rest):
            if tensor is not None:
                with tf.device(self._devices[i]):
                    self._rest[i], taken[i] = switch(tensor, predicate(self._places[i]))
        return taken

    def leave(self, values: Sequence[tf.Tensor | None]) -> None:
        """Takes what an action made of them, of the same shapes; what is None there stays None."""
        self._results.append(list(values))

    def merged(self) -> Grads:
        """The values after whichever action was performed, or none."""
        found = merged([self._rest, *self._results], self._devices)
        for tensor, shape in zip(found, self._shapes, strict=True):
            if tensor is not None:
                tensor.set_shape(shape)
        return found


class Fan:
    """A list of tensors that goes to one of some users; the step says to which.

    One operation a tensor, where `Branching` has one for each user.

    Args:
        tensors: the values before; None stays None.
        devices: of each.
        places: the number of each one's device in its home.
        number: of the user, from 0; on each device an int32 scalar.
        count: of users; with the number `count`, it is none of them.
    """

    def __init__(
        self,
        tensors: Sequence[tf.Tensor | None],
        devices: Sequence[str],
        places: Sequence[int],
        number: Number,
        count: int,
    ) -> None:
        self._devices = devices
        self._shapes = [None if t is None else t.shape for t in tensors]
        self._results: list[Grads] = [[None] * len(tensors) for _ in range(count + 1)]
        for i, (tensor, device, place) in enumerate(zip(tensors, devices, places, strict=True)):
            if tensor is None:
                continue
            with tf.device(device):
                for result, side in zip(
                    self._results, switch_to(tensor, number(place), count + 1), strict=True
                ):
                    result[i] = side

    def to(self, user: int) -> Grads:
        """The values as one user finds them, and what it has made of them so far."""
        return self._results[user]

    def leave(self, user: int, values: Sequence[tf.Tensor | None]) -> None:
        """Takes what a user makes of them, of the same shapes."""
        self._results[user] = [*values]

    def merged(self) -> Grads:
        """The values after whichever user they went to, or none."""
        found = merged(self._results, self._devices)
        for tensor, shape in zip(found, self._shapes, strict=True):
            if tensor is not None:
                tensor.set_shape(shape)
        return found


def merged(found: Sequence[Sequence[tf.Tensor | None]], devices: Sequence[str]) -> Grads:
    """Of lists of tensors that one which is there when the step runs; None where none ever is.

    Args:
        found: the lists.
        devices: where each tensor of the result is to lie.
    """
    if len(found) == 1:
        return [*found[0]]
    chosen: Grads = []
    for device, *tensors in zip(devices, *found, strict=True):
        there = [t for t in tensors if t is not None]
        with tf.device(device):
            chosen.append(merge(there) if there else None)
    return chosen
