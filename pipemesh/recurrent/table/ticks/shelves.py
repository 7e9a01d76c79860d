"""What stays on a home between its actions, at one tick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor, list_get, list_set
from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.table.lists import nothing
from pipemesh.recurrent.table.ticks.branches import Fan
from pipemesh.recurrent.table.ticks.program import Access, Shelf

# Gives for a place of a home, and the name of a column, the number of the tick.
Numbers = Callable[[int, Any], tf.Tensor]


class Shelves:
    """The shelves of a home, on their way through its actions.

    Args:
        handles: the list of each shelf before the tick.
        devices: of the home.
        numbers: of the tick.
        num_roles: how many kinds of actions the home has.
    """

    def __init__(
        self,
        handles: Mapping[Shelf, Grads],
        devices: Sequence[str],
        numbers: Numbers,
        num_roles: int,
    ) -> None:
        self._devices = devices
        self._numbers = numbers
        self._fans = {
            shelf: Fan(
                handle,
                [devices[shelf.place]],
                [shelf.place],
                lambda place: numbers(place, "code"),
                num_roles,
            )
            for shelf, handle in handles.items()
        }
        self._constants: dict[Any, tf.Tensor] = {}

    def take(
        self,
        role: int,
        accesses: Sequence[Access | None],
        specs: Sequence[tf.TensorSpec | None],
    ) -> list[Any]:
        """Takes the tensors of a value, so that the shelves no longer hold them.

        Args:
            role: the number of the kind of action.
            accesses: one a tensor.
            specs: their shapes and dtypes.
        """
        values: list[tf.Tensor | None] = [None] * len(accesses)
        for shelf, mine in _by_shelf(accesses).items():
            (handle,) = self._fans[shelf].to(role)
            with tf.device(self._devices[shelf.place]):
                for i, access in mine:
                    values[i] = self._get(handle, access, specs[i])
                gets = [t.op for i, _ in mine if (t := values[i]) is not None]
                empty = self._once(shelf, "nothing", lambda s=shelf: nothing(s.dtype))
                # Else a list of which something is still to be read would be copied.
                with tf.control_dependencies(gets):
                    for _, access in mine:
                        handle = self._set(handle, access, empty)
            self._fans[shelf].leave(role, [handle])
        return values

    def put(
        self, role: int, accesses: Sequence[Access | None], values: Sequence[MaybeTensor]
    ) -> None:
        """Puts the tensors of a value on the shelves."""
        for shelf, mine in _by_shelf(accesses).items():
            (handle,) = self._fans[shelf].to(role)
            with tf.device(self._devices[shelf.place]):
                for i, access in mine:
                    if (value := values[i]) is not None:
                        handle = self._set(handle, access, value)
            self._fans[shelf].leave(role, [handle])

    def merged(self) -> dict[Shelf, Grads]:
        """The lists after the tick."""
        return {shelf: fan.merged() for shelf, fan in self._fans.items()}

    def _get(self, handle: Any, access: Access, spec: tf.TensorSpec | None) -> tf.Tensor:
        assert spec is not None
        sizes = static_sizes(spec)
        shape = self._once(access.shelf, tuple(sizes), lambda: tf.constant(sizes, tf.int32))
        value = list_get(handle, self._slot(access), shape, spec.dtype)
        value.set_shape(spec.shape)
        return value

    def _set(self, handle: Any, access: Access, value: tf.Tensor) -> tf.Tensor:
        return list_set(handle, self._slot(access), value)

    def _slot(self, access: Access) -> tf.Tensor:
        return self._numbers(access.shelf.place, access)

    def _once(self, shelf: Shelf, name: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """A constant that all actions share; each is an operation a tick."""
        if (shelf, name) not in self._constants:
            self._constants[shelf, name] = make()
        return self._constants[shelf, name]


def _by_shelf(accesses: Sequence[Access | None]) -> dict[Shelf, list[tuple[int, Access]]]:
    found: dict[Shelf, list[tuple[int, Access]]] = {}
    for i, access in enumerate(accesses):
        if access is not None:
            found.setdefault(access.shelf, []).append((i, access))
    return found
