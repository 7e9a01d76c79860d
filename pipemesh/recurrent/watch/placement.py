"""The devices on which each stage ran, read from the graphs that TensorFlow executed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipemesh.backend.devices import short_name
from pipemesh.backend.graphs import collected_graphs
from pipemesh.errors import DeviceError

_ACTION = re.compile(r"(?:^|/)action_(\d+)[FRBIW]\d*(?:_and_every_\d+)?(?:/|$)")
# They are on the devices that tensors pass between, at both ends.
_TRANSFERS = frozenset(["_Send", "_Recv", "_HostSend", "_HostRecv"])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices on which the operations of each stage ran.

    Attributes:
        wanted: the devices of each stage, one per replica; a single device may be given as a
            string.
        found: for each stage, the number of operations of its actions by device.

    Example:
        >>> placement = Placement(("CPU:0", "CPU:1"), ({"CPU:0": 70}, {"CPU:1": 68, "CPU:0": 2}))
        >>> print(placement)
        stage 0 on CPU:0: 70 operations
        stage 1 on CPU:1: 68 operations, and 2 on CPU:0
        >>> placement.check()
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: 2 operations of stage 1 ran on CPU:0 instead of CPU:1
    """

    wanted: tuple[str | tuple[str, ...], ...]
    found: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, metadata: Any, devices: Sequence[str | Sequence[str]]) -> Placement:
        """Returns the placement of a step.

        Args:
            metadata: a `RunMetadata` with partition graphs: from `record_placement`, or from a TF1
                session's `run` with `RunOptions(output_partition_graphs=True)`.
            devices: the device of each stage, or the devices of its replicas, with type and number.

        Raises:
            DeviceError: the metadata holds no action of these stages.
        """
        wanted = tuple(tuple(map(short_name, _names(home))) for home in devices)
        found: list[collections.Counter[str]] = [collections.Counter() for _ in devices]
        for graph in metadata.partition_graphs:
            for node in graph.node:
                action = _ACTION.search(node.name)
                if action is not None and node.op not in _TRANSFERS:
                    found[int(action[1])][short_name(node.device)] += 1
        for stage, counts in enumerate(found):
            if not counts:
                raise DeviceError(
                    f"the metadata knows no operation of stage {stage}; record the first step of a "
                    "function, or give RunOptions(output_partition_graphs=True) to the session"
                )
        return cls(wanted, tuple(dict(counts) for counts in found))

    def check(self) -> None:
        """Checks that every stage ran on all of its devices and on no other.

        Raises:
            DeviceError: an operation ran on another device, or a replica did not run.
        """
        for stage, (wanted, counts) in enumerate(zip(self.wanted, self.found, strict=True)):
            names = ", ".join(_names(wanted))
            for device, count in counts.items():
                if device not in _names(wanted):
                    raise DeviceError(
                        f"{count} operations of stage {stage} ran on {device} instead of {names}"
                    )
            for device in _names(wanted):
                if device not in counts:
                    raise DeviceError(f"no operation of stage {stage} ran on {device}")

    def __str__(self) -> str:
        lines = []
        for stage, (wanted, counts) in enumerate(zip(self.wanted, self.found, strict=True)):
            own = _names(wanted)
            numbers = " + ".join(str(counts.get(device, 0)) for device in own)
            line = f"stage {stage} on {', '.join(own)}: {numbers} operations"
            others = [f"{n} on {d}" for d, n in sorted(counts.items()) if d not in own]
            lines.append(", and ".join([line, *others]))
        return "\n".join(lines)


@contextlib.contextmanager
def record_placement() -> Iterator[Any]:
    """Records the graphs of TF2 functions that run for the first time inside the context.

    TensorFlow reports a graph when it places it, which it does once. Later steps record nothing.

    Yields:
        A `RunMetadata`, which is filled when the context ends.
    """
    with collected_graphs() as metadata:
        yield metadata


def _names(home: str | Sequence[str]) -> Sequence[str]:
    return (home,) if isinstance(home, str) else home
