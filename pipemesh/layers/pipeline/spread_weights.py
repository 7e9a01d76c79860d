"""The distribution of a stage's weights over its replicas."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from pipemesh.backend.devices import device_of_scope, is_device
from pipemesh.backend.static_shape import num_bytes
from pipemesh.layers.named.weight_slices import stays
from pipemesh.recurrent import Home


@contextlib.contextmanager
def spread_weights(home: Home) -> Iterator[None]:
    """Spreads variables that are made inside, eagerly, over the replicas of a stage.

    Each goes to the replica with the fewest bytes so far, at the same position among its devices.
    Its optimizer state and the sum of all replicas' gradients are there. The other replicas get its
    value from there once a step: stage 1 of ZeRO (Rajbhandari et al., 2020), weight by weight.
    Slices of weights that named layers cut over the replicas are not moved.
    """
    held: collections.Counter[int] = collections.Counter()

    def create(make: Callable[..., Any], **kwargs: Any) -> Any:
        here = device_of_scope()
        places = [n for n, name in enumerate(home.replica(0)) if here and is_device(here, name)]
        if stays() or not places:
            return make(**kwargs)
        devices = [home.replica(number)[places[0]] for number in range(home.num_replicas)]
        number = min(range(len(devices)), key=lambda n: held[n * home.group + places[0]])
        with tf.device(devices[number]):
            variable = make(**kwargs)
        held[number * home.group + places[0]] += num_bytes([variable])
        return variable

    if home.num_replicas == 1:
        yield
        return
    with tf.compat.v1.variable_creator_scope(create):
        yield


def replica_of(variable: Any, home: Home) -> int:
    """Returns the number of the replica that a variable is on; 0 if it is on none."""
    pinned = getattr(variable, "device", None)
    if not pinned or home.num_replicas == 1:
        return 0
    numbers = [n for n, device in enumerate(home.devices) if is_device(pinned, device)]
    return numbers[0] // home.group if numbers else 0
