"""The devices that own a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from pipemesh.errors import DeviceError


@dataclasses.dataclass(frozen=True)
class Home:
    """The devices of a stage, each of which computes with rows of its own.

    With several, a stage runs once a replica: each has a copy of the weights and takes the same
    number of neighbouring examples of every microbatch. What is not cut, such as a sum that
    stages hand on, lies on the first device.

    Attributes:
        devices: names of TensorFlow devices, one for each replica.

    Raises:
        DeviceError: there is no device, or what was given are no names.

    Example:
        >>> home = Home(("GPU:0", "GPU:1"))
        >>> home.first, len(home), str(home)
        ('GPU:0', 2, 'GPU:0, GPU:1')
    """

    devices: tuple[str, ...]

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

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        return ", ".join(self.devices)
