"""Stages take groups in turn, as the table of `pipemesh.schedule.decode` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import pin


class Turns:
    """Holds groups back at a stage until the one before them has left it.

    Without it TensorFlow would start whatever is ready: two groups at one stage share its device,
    and both leave it late.

    Args:
        gates: for each device a scalar that is there when the group before has left; by default
            all devices are free.

    Attributes:
        gates: the same after all groups that have been let in so far.

    Example:
        >>> @tf.function
        ... def one_after_the_other(x):
        ...     turns = Turns.free(["CPU:0"])
        ...     for _ in range(2):
        ...         x = turns.enter(0, x) + 1
        ...         turns.leave(0, x)
        ...     return x
        >>> float(one_after_the_other(tf.constant(3.0)))
        5.0
    """

    def __init__(self, gates: Sequence[tf.Tensor]) -> None:
        self.gates = list(gates)

    @classmethod
    def free(cls, devices: Sequence[str]) -> Turns:
        """No group is at any of the devices.

        Args:
            devices: the first one of each replica of each stage.
        """
        gates = []
        for device in devices:
            with tf.device(device):
                gates.append(tf.zeros([], tf.int32))
        return cls(gates)

    def enter(self, device: int, values: Any) -> Any:
        """The inputs of a stage, which are there when its device is free.

        Args:
            device: its number.
            values: any structure of tensors.
        """
        with tf.control_dependencies([self.gates[device]]):
            return tf.nest.pack_sequence_as(values, pin(tf.nest.flatten(values)))

    def leave(self, device: int, values: Any) -> None:
        """Notes what is there when a device is free again.

        Args:
            device: its number.
            values: what the stage has computed, any structure of tensors.
        """
        gate = self.gates[device]
        with tf.control_dependencies(tf.nest.flatten(values)), tf.device(gate.device):
            (self.gates[device],) = pin([gate])
