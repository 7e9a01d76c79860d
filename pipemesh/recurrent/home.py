"""The devices that own a stage."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipemesh.errors import DeviceError


@dataclasses.dataclass(frozen=True)
class Home:
    """The devices of a stage.

    With several replicas a stage runs once for each: each has a copy of the weights and takes the
    same number of neighbouring examples of every microbatch. A replica may have several devices,
    which the stage divides its work among itself, with `current_devices`. What it does not divide
    lies on the first of them, and what replicas do not have each for themselves, such as a sum that
    stages hand on, on the first of the home.

    Attributes:
        devices: names of TensorFlow devices: those of the first replica, of the second, and so on.
        num_replicas: how many replicas there are; by default one a device.

    Raises:
        DeviceError: there is no device, what was given are no names, or the devices do not divide
            among the replicas.

    Example:
        >>> home = Home(("GPU:0", "GPU:1"))
        >>> home.first, len(home), str(home)
        ('GPU:0', 2, 'GPU:0, GPU:1')
        >>> home = Home(("GPU:0", "GPU:1", "GPU:2", "GPU:3"), num_replicas=2)
        >>> home.replica(1)
        ('GPU:2', 'GPU:3')
    """

    devices: tuple[str, ...]
    num_replicas: int = 0

    def __post_init__(self) -> None:
        given: Any = self.devices
        devices = [given] if isinstance(given, str) else given
        known = isinstance(devices, Iterable) and tuple(devices)
        if not known or not all(isinstance(device, str) for device in known):
            raise DeviceError(
                f"a home has the devices {given!r}; give names of one or several, for "
                "example ('GPU:0', 'GPU:1')"
            )
        object.__setattr__(self, "devices", known)
        object.__setattr__(self, "num_replicas", self.num_replicas or len(known))
        if len(known) % self.num_replicas:
            raise DeviceError(
                f"a home has {len(known)} devices ({self}) and {self.num_replicas} replicas; give "
                "each replica as many devices"
            )

    @classmethod
    def of(cls, given: Home | str | Sequence[str]) -> Home:
        """A home as it is, or that of a device or several.

        Raises:
            DeviceError: these are no names of devices.
        """
        return given if isinstance(given, Home) else cls(given)  # type: ignore[arg-type]

    @property
    def first(self) -> str:
        """Where everything lies that is not cut."""
        return self.devices[0]

    @property
    def group(self) -> int:
        """How many devices a replica has."""
        return len(self.devices) // self.num_replicas

    def replica(self, number: int) -> tuple[str, ...]:
        """The devices of a replica."""
        return self.devices[number * self.group :][: self.group]

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        return ", ".join(self.devices)


_current: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("devices", default=())


@contextlib.contextmanager
def calling_on(devices: tuple[str, ...]) -> Iterator[None]:
    """Inside, the function of a stage is called for a replica with these devices."""
    token = _current.set(devices)
    try:
        yield
    finally:
        _current.reset(token)


def current_devices() -> tuple[str, ...]:
    """The devices of the replica that a stage's function is called for; none outside of one.

    The first is the device of the scope that the function is called in. On the others it puts
    operations with `tf.device` by itself; the parts that are cut out of its graph keep them there.
    """
    return _current.get()
