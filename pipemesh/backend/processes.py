"""The former way to several hosts, which names the new one for one release."""

from __future__ import annotations

from typing import Any, NoReturn

from pipemesh.errors import DeviceError


def connect_processes(*_: Any, **__: Any) -> NoReturn:
    """Raises a DeviceError: one client drives the devices of all hosts now."""
    raise DeviceError(
        "connect_processes was removed: several processes no longer run one program together. "
        "Start `pipemesh worker` on each host, call pipemesh.backend.cluster.connect_workers in "
        "one process, and give `Cores` the devices that it returns"
    )
