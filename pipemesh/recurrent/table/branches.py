"""Values that only some of the actions of a home change, chosen between when the step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.recurrent.passes.passes import Grads

Predicate = Callable[[int], tf.Tensor]


class Branching:
    """A list of tensors on its way through actions, of which at most one is performed.

    TensorFlow's own conditionals put what they choose from on one device and take all of it through
    each branch. Here each tensor is switched on its own device, for those actions that use it.

    Args:
        tensors: the values before; None stays None.
        devices: of each.
        places: the number of each one's device in its home, that predicates are asked for.
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
        """The values for one action, there only if the predicate holds.

        Args:
            predicate: for a place the boolean that is there.
        """
        taken: Grads = [None] * len(self._rest)
        for i, tensor in enumerate(self._rest):
            if tensor is not None:
                with tf.device(self._devices[i]):
                    pair = tf.raw_ops.Switch(data=tensor, pred=predicate(self._places[i]))
                self._rest[i], taken[i] = pair.output_false, pair.output_true
        return taken

    def leave(self, values: Sequence[tf.Tensor | None]) -> None:
        """Takes what an action made of them; what is None there stays None."""
        self._results.append(list(values))

    def merged(self, keeps_shapes: bool = True) -> Grads:
        """The values after whichever action was performed, or none.

        Args:
            keeps_shapes: whether all of them have the shape that the first had.
        """
        merged: Grads = []
        for i, tensor in enumerate(self._rest):
            if tensor is None or not self._results:
                merged.append(tensor)
                continue
            inputs = [tensor, *(values[i] for values in self._results)]
            with tf.device(self._devices[i]):
                found = tf.raw_ops.Merge(inputs=inputs).output
            if keeps_shapes:
                found.set_shape(self._shapes[i])
            merged.append(found)
        return merged
