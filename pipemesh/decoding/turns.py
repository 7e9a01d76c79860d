"""The order in which stages take groups, given by the schedule `pipemesh.schedule.decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import pin


class Turns:
    """Gates that hold groups back at a stage until the previous group has left it."""

    # Without gates TensorFlow would start every ready operation. Two groups at one stage share its
    # device, and both would leave it late. `gates` has one scalar per device, computed when the
    # previous group has left.

    def __init__(self, gates: Sequence[tf.Tensor]) -> None:
        self.gates = list(gates)

    @classmethod
    def free(cls, devices: Sequence[str]) -> Turns:
        """Returns turns in which all devices, one for each replica of each stage, are free."""
        gates = []
        for device in devices:
            with tf.device(device):
                gates.append(tf.zeros([], tf.int32))
        return cls(gates)

    def enter(self, device: int, values: Any) -> Any:
        """Returns the inputs of a stage, available when its device is free."""
        with tf.control_dependencies([self.gates[device]]):
            return tf.nest.pack_sequence_as(values, pin(tf.nest.flatten(values)))

    def leave(self, device: int, values: Any) -> None:
        """Records the results that make a device free again."""
        gate = self.gates[device]
        with tf.control_dependencies(tf.nest.flatten(values)), tf.device(gate.device):
            (self.gates[device],) = pin([gate])
