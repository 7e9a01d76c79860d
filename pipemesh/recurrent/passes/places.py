"""Which devices of a home the tensors of a traced stage lie on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.devices import is_device
from pipemesh.recurrent.home import Home
from pipemesh.recurrent.passes.graph_cut import node_of


class Places:
    """The places of a stage's tensors in its home.

    Args:
        home: of the stage.
        replica: the number of the replica that a tensor belongs to.
        graph: the traced graph.
        given: for what stands for arguments on which of a replica's devices these lie. For other
            tensors the node that makes them says it; without a word it is the first one.
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
        """The number of the device, among all of the home, that a tensor lies on."""
        replica = self._replica(name)
        if self._home.group == 1:
            return replica
        own = self._given.get(name)
        if own is None:
            own = self._number(self._graph.get_operation_by_name(node_of(name)).device, replica)
        return replica * self._home.group + own

    def _number(self, device: str, replica: int) -> int:
        """Which of a replica's devices this is; 0 for one that is none of them."""
        if (device, replica) not in self._numbers:
            known = [is_device(device, name) for name in self._home.replica(replica)]
            self._numbers[device, replica] = known.index(True) if True in known else 0
        return self._numbers[device, replica]


def detached(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors without their gradients, each on its own device: else they might leave it."""
    found = []
    for tensor in tensors:
        with tf.device(tensor.device):
            found.append(tf.stop_gradient(tensor))
    return found


def identity_beside(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor once more, on its own device; where it has none, on that of the scope."""
    with tf.device(tensor.device):
        return tf.identity(tensor)
