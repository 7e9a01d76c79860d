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

    Each replica has a copy of the weights and computes the same number of neighbouring examples of
    every microbatch. A replica may have several devices; the stage divides its work among them with
    `current_devices`. Undivided tensors lie on the first device of the replica. Tensors that all
    replicas share, such as a sum, lie on the first device of the home.

    Attributes:
        devices: names of TensorFlow devices, ordered by replica.
        num_replicas: number of replicas; by default one per device.

    Raises:
        DeviceError: there is no device, a name is not a string, or the number of devices is not a
            multiple of the number of replicas.

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
        """Returns a home for a device or several; a `Home` is returned as it is.

        Raises:
            DeviceError: the argument is not a home or device names.
        """
        return given if isinstance(given, Home) else cls(given)  # type: ignore[arg-type]

    @property
    def first(self) -> str:
        """The device of every tensor that is not split."""
        return self.devices[0]

    @property
    def group(self) -> int:
        """The number of devices of a replica."""
        return len(self.devices) // self.num_replicas

    def replica(self, number: int) -> tuple[str, ...]:
        """Returns the devices of a replica."""
        return self.devices[number * self.group :][: self.group]

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        return ", ".join(self.devices)


_current: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("devices", default=())


@contextlib.contextmanager
def calling_on(devices: tuple[str, ...]) -> Iterator[None]:
    """Sets the devices that `current_devices` returns inside the context."""
    token = _current.set(devices)
    try:
        yield
    finally:
        _current.reset(token)


def current_devices() -> tuple[str, ...]:
    """Returns the devices of the replica that calls the stage's function; outside of a stage, none.

    The function runs in the device scope of the first device. It places operations on the others
    with `tf.device`; the functions that are cut from its graph keep them there.
    """
    return _current.get()
