"""Seconds of what a program computes and sends, on a machine of which a few figures are known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pipemesh.errors import PlanError
from pipemesh.mesh import Mesh
from pipemesh.mesh.find_layout import Axes
from pipemesh.plan.network import Link, Network

# The axes, the primitive or operation, and the pass.
Key = tuple[tuple[str, ...], str, str]


class Counts(Protocol):
    """The counts of one device that `pipemesh.lowering.OperationCosts` has."""

    @property
    def rows(self) -> Mapping[Key, tuple[int, int]]:
        """Calls and bytes sent by axes, primitive and pass."""
        ...

    @property
    def work(self) -> Mapping[Key, tuple[int, int, int]]:
        """Calls, flops and bytes of memory by axes, operation and pass."""
        ...


@dataclasses.dataclass(frozen=True)
class Machine:
    """The speed of a device, and its links to others.

    An operation takes as long as its flops or its bytes of memory, whichever is longer (the
    roofline of Williams, Waterman, Patterson, 2009). Communication does not overlap with it.

    Attributes:
        flops: flops a second of one device.
        bandwidth: bytes of memory a second that it reads and writes.
        network: hosts and links of the devices; one `Link` if all are alike.
        call: seconds of an operation besides.

    Raises:
        PlanError: a number is invalid.

    Example:
        >>> machine = Machine(flops=1e12, bandwidth=1e11, network=Link(1e-5, 1e10))
        >>> machine.operation(1, 2e9, 1e6), machine.operation(1, 1e6, 1e9)
        (0.002, 0.01)
    """

    flops: float
    bandwidth: float = math.inf
    network: Network | Link = dataclasses.field(default_factory=lambda: Link(0.0, math.inf))
    call: float = 0.0

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.bandwidth > 0 and 0 <= self.call < math.inf):
            raise PlanError(
                f"a machine has flops={self.flops}, bandwidth={self.bandwidth} and "
                f"call={self.call}; the first two must be above 0, call a number from 0 on"
            )

    def operation(self, calls: float, flops: float, touched: float) -> float:
        """Returns the seconds of an operation."""
        return calls * self.call + max(flops / self.flops, touched / self.bandwidth)

    def parts(self, costs: Counts, mesh: Mesh, times: float = 1.0) -> dict[str, float]:
        """Returns the seconds of a program: `compute`, and those of each set of axes.

        Args:
            costs: the counts of one device.
            mesh: the mesh of all devices, in whose order they are numbered.
            times: how often the program runs.

        Example:
            >>> class Found:
            ...     rows = {(("model",), "all_reduce", "forward"): (1, 1000)}
            ...     work = {(("model",), "einsum", "forward"): (1, 4000, 100)}
            >>> machine = Machine(flops=1e6, network=Link(0.0, 1e6))
            >>> machine.parts(Found(), Mesh.from_text("model:2"))
            {'compute': 0.004, 'model': 0.001}
        """
        seconds = {"compute": sum(self.operation(*row) for row in costs.work.values())}
        for (axes, primitive, _), (calls, sent) in costs.rows.items():
            name = "+".join(axes)
            taken = self._sent(mesh, axes, primitive, calls, sent)
            seconds[name] = seconds.get(name, 0.0) + taken
        return {name: times * value for name, value in seconds.items()}

    def _sent(
        self, mesh: Mesh, axes: Iterable[str], primitive: str, calls: int, sent: float
    ) -> float:
        """Returns the seconds of some calls of a primitive along axes."""
        axes = [axis for axis in axes if mesh.size(axis) > 1]
        members, sent = math.prod(map(mesh.size, axes)), sent / max(calls, 1)
        link = self.network
        if isinstance(link, Network):
            # The first and the last member of a group.
            reach = 1 + sum(mesh.stride(axis) * (mesh.size(axis) - 1) for axis in axes)
            stride = min(map(mesh.stride, axes), default=1)
            # With equal distances between neighbours, each host first adds what its members have.
            is_row = members > 1 and reach == 1 + stride * (members - 1)
            if is_row and sent:
                return calls * link.collective(primitive, members, stride, sent)
            link = link.link(reach)
        return calls * link.collective(primitive, members, sent)


def least_seconds(
    work: Mapping[Key, tuple[int, int, int]], mesh: Mesh, machine: Machine
) -> Callable[[Axes], float]:
    """Returns a lower bound of the seconds of a program, given the axes of some of its dims.

    Args:
        work: of the whole program, with dims in the place of axes.
        mesh: the mesh.
        machine: the machine.
    """
    sizes = sorted(((mesh.size(axis), axis) for axis in mesh.axis_names), reverse=True)

    def least(decided: Axes) -> float:
        # Counts add up operations of one name whose dims are split alike, so this bound does, too.
        totals: dict[tuple[str, str], list[float]] = {}
        for (dims, operation, direction), numbers in work.items():
            used = {decided[dim] for dim in dims if dim in decided}
            # Each dim without an axis yet may have one, the longest first.
            free = sum(dim not in decided for dim in dims)
            others = [size for size, axis in sizes if axis not in used]
            taken = [size for size, axis in sizes if axis in used] + others[:free]
            total = totals.setdefault((operation, direction), [0.0] * 3)
            for at, count in enumerate(numbers):
                total[at] += count / (math.prod(taken) if at else 1)
        return sum(machine.operation(*total) for total in totals.values())

    return least


def by_work(work: Mapping[Key, tuple[int, int, int]], dims: Iterable[str]) -> list[str]:
    """Returns dims in the order of the flops that they divide, most first."""
    flops: dict[Any, int] = dict.fromkeys(dims, 0)
    for (members, _, _), (_, number, _) in work.items():
        for dim in members:
            if dim in flops:
                flops[dim] += number
    return sorted(flops, key=lambda dim: -flops[dim])
