"""The weights of a stage as its replicas get them: once a step, or anew for each action."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.operations import pin
from pipemesh.recurrent.stage import Stage


def of_every_replica(stage: Stage) -> list[tf.Tensor]:
    """The weights of a stage for each replica: copies, made once a step, of those of others.

    Those that are fetched are there once for each as they lie.
    """
    home, found = stage.of_home, list[tf.Tensor]()
    for replica in range(home.num_replicas):
        for i, tensor in enumerate(stage.theta):
            place = replica * home.group + stage.theta_places[i]
            if place in stage.holders(i) and place != stage.owners[i]:
                with tf.device(home.devices[place]):
                    tensor = tf.identity(tensor)
            found.append(tensor)
    return found


def with_fetched(
    stage: Stage, thetas: Sequence[tf.Tensor], tokens: Sequence[Sequence[tf.Operation]]
) -> list[tf.Tensor]:
    """The weights for one action, of which those that are fetched leave their owners now.

    What waits until the device that wants them is free is an operation of the owner's: TensorFlow
    sends as soon as there is something to send, and to each device only once what is one tensor.

    Args:
        stage: the stage.
        thetas: what `of_every_replica` gave.
        tokens: for each of the home's devices what it has to finish before.
    """
    home, found = stage.of_home, [*thetas]
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
                found[number] = tensor
    return found


def guarded(
    stage: Stage, thetas: Sequence[tf.Tensor], tokens: Sequence[Sequence[tf.Operation]]
) -> list[tf.Tensor]:
    """The weights for one action, which are there only if the tokens of its home are.

    Args:
        stage: the stage.
        thetas: what `of_every_replica` gave.
        tokens: for each of the home's devices what it has to finish before.
    """
    home, found = stage.of_home, [*thetas]
    ways: dict[int, list[int]] = {}
    for number in range(len(thetas)):
        replica, i = divmod(number, len(stage.theta))
        place = replica * home.group + stage.theta_places[i]
        ways.setdefault(stage.owners[i] if i in stage.fetched else place, []).append(number)
    for place, numbers in ways.items():
        with tf.device(home.devices[place]), tf.control_dependencies(tokens[place]):
            there = pin([thetas[number] for number in numbers])
        for number, tensor in zip(numbers, there, strict=True):
            found[number] = tensor
    return found
