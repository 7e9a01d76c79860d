"""Weights for the replicas of a stage: copied once per step, or fetched for each action."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.operations import pin
from pipemesh.recurrent.stage import Stage


def of_every_replica(stage: Stage) -> list[tf.Tensor]:
    """Returns the weights of each replica, copied once per step from other devices.

    A fetched weight stays on its owner, and is listed once for each replica.
    """
    home, thetas = stage.of_home, list[tf.Tensor]()
    for replica in range(home.num_replicas):
        for i, tensor in enumerate(stage.theta):
            place = replica * home.group + stage.theta_places[i]
            if place in stage.holders(i) and place != stage.owners[i]:
                with tf.device(home.devices[place]):
                    tensor = tf.identity(tensor)
            thetas.append(tensor)
    return thetas


def with_fetched(
    stage: Stage, thetas: Sequence[tf.Tensor], tokens: Sequence[Sequence[tf.Operation]]
) -> list[tf.Tensor]:
    """Returns the weights for one action, and makes owners send the fetched ones.

    An operation of the owner waits until the device of the action is free: TensorFlow sends a
    tensor as soon as it exists, and only once to each device. `tokens` are, for each device of the
    home, the operations that it must finish before.
    """
    home, fetched = stage.of_home, [*thetas]
    for replica in range(home.num_replicas if stage.fetched else 0):
        ways: dict[tuple[int, int], list[int]] = {}
        for i in sorted(stage.fetched):
            target = replica * home.group + stage.theta_places[i]
            number = replica * len(stage.theta) + i
            ways.setdefault((stage.owners[i], target), []).append(number)
        for (owner, target), numbers in ways.items():
            with tf.device(home.devices[owner]), tf.control_dependencies(tokens[target]):
                sent = pin([thetas[number] for number in numbers])
            for number, tensor in zip(numbers, sent, strict=True):
                fetched[number] = tensor
    return fetched


def guarded(
    stage: Stage, thetas: Sequence[tf.Tensor], tokens: Sequence[Sequence[tf.Operation]]
) -> list[tf.Tensor]:
    """Returns the weights for one action, which are dead if the tokens of its home are."""
    home, guarded_thetas = stage.of_home, [*thetas]
    ways: dict[int, list[int]] = {}
    for number in range(len(thetas)):
        replica, i = divmod(number, len(stage.theta))
        place = replica * home.group + stage.theta_places[i]
        ways.setdefault(stage.owners[i] if i in stage.fetched else place, []).append(number)
    for place, numbers in ways.items():
        with tf.device(home.devices[place]), tf.control_dependencies(tokens[place]):
            pinned = pin([thetas[number] for number in numbers])
        for number, tensor in zip(numbers, pinned, strict=True):
            guarded_thetas[number] = tensor
    return guarded_thetas
