"""The devices of a home on which the tensors of a traced stage lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.devices import is_device
from pipemesh.recurrent.home import Home
from pipemesh.recurrent.passes.graph_cut import node_of


class Places:
    """The device index of each tensor of a stage in its home.

    Args:
        home: of the stage.
        replica: returns the replica that a tensor belongs to.
        graph: the traced graph.
        given: for placeholders of arguments the index of their device within a replica. Other
            tensors are on the device of their node; the default is the first one.
    """

    def __init__(
        self, home: Home, replica: Callable[[str], int], graph: Any, given: Mapping[str, int]
    ) -> None:
        self._home = home
        self._replica = replica
        self._graph = graph
        self._given = given
        self._numbers: dict[tuple[str, int], int] = {}

    def of(self, name: str) -> int:
        """Returns the index, among all devices of the home, of a tensor's device."""
        replica = self._replica(name)
        if self._home.group == 1:
            return replica
        own = self._given.get(name)
        if own is None:
            own = self._number(self._graph.get_operation_by_name(node_of(name)).device, replica)
        return replica * self._home.group + own

    def _number(self, device: str, replica: int) -> int:
        """Returns the index of a device within a replica; 0 for a device outside of it."""
        if (device, replica) not in self._numbers:
            known = [is_device(device, name) for name in self._home.replica(replica)]
            self._numbers[device, replica] = known.index(True) if True in known else 0
        return self._numbers[device, replica]


def detached(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors without gradients, pinned so that each stays on its device."""
    found = []
    for tensor in tensors:
        with tf.device(tensor.device):
            found.append(tf.stop_gradient(tensor))
    return found


def identity_beside(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a tensor on its own device; without one, on the device of the scope."""
    with tf.device(tensor.device):
        return tf.identity(tensor)
