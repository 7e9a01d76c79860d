"""How long it takes to send: links, and what groups of devices do together."""

from __future__ import annotations

import dataclasses
import math

from pipemesh.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins two devices.

    Attributes:
        latency: seconds from the call until the first byte arrives.
        bandwidth: bytes a second, each way; infinite where nothing has to be copied.

    Raises:
        PlanError: the latency is negative or not finite, or the bandwidth is not above 0.

    Example:
        >>> Link(latency=1e-5, bandwidth=1e9).seconds(10_000)
        2e-05
        >>> Link(0.0, -1)
        Traceback (most recent call last):
        pipemesh.errors.PlanError: a link has a bandwidth of -1; it must be above 0 bytes a second
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise PlanError(f"a link has a latency of {self.latency}; it must be 0 seconds or more")
        if not self.bandwidth > 0:
            raise PlanError(
                f"a link has a bandwidth of {self.bandwidth}; it must be above 0 bytes a second"
            )

    def seconds(self, size: float) -> float:
        """How long so many bytes take; nothing is sent in no time.

        Args:
            size: in bytes.
        """
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce(self, members: int, size: float) -> float:
        """How long a sum takes that all members of a group get.

        The faster of two ways: a ring, which sends least and waits for each member in turn
        (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009), and two trees, which wait for a logarithm of them (Sanders, Speck,
        Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009).

        Args:
            members: of the group.
            size: what each puts in, in bytes.

        Example:
            >>> Link(latency=0.0, bandwidth=1e9).all_reduce(4, 1e6)
            0.0015
        """
        if members == 1 or not size:
            return 0.0
        ring = 2 * (members - 1) * (self.latency + size / members / self.bandwidth)
        trees = 2 * (math.ceil(math.log2(members)) * self.latency + size / self.bandwidth)
        return min(ring, trees)

    def all_gather(self, members: int, size: float) -> float:
        """How long it takes until each member has what all put in, by a ring.

        As long as a reduce-scatter of a sum of `members * size`.

        Args:
            members: of the group.
            size: what each puts in, in bytes.
        """
        return (members - 1) * self.seconds(size)


@dataclasses.dataclass(frozen=True)
class Network:
    """Devices in hosts.

    Attributes:
        host_size: devices a host.
        inside: the link between two devices of a host.
        between: the link of one device to those of other hosts, all devices of a host at once.

    Raises:
        PlanError: a host has no device.

    Example:
        >>> fast, slow = Link(1e-6, 1e11), Link(1e-5, 1e9)
        >>> Network(8, fast, slow).link(8) == fast, Network(8, fast, slow).link(9) == slow
        (True, True)
    """

    host_size: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        if self.host_size < 1:
            raise PlanError(f"a host has {self.host_size} devices; it must have at least 1")

    def link(self, distance: int) -> Link:
        """The link between a device and one that lies behind so many neighbours, itself counted.

        Args:
            distance: how many devices both and all between them are.
        """
        return self.inside if distance <= self.host_size else self.between

    def joining(self, here: int, there: int, number: int) -> Link:
        """The link from some neighbours to as many others, each to its own.

        Args:
            here: the first of them.
            there: the first of the others.
            number: how many there are.
        """
        host = self.host_size
        near = all((here + i) // host == (there + i) // host for i in (0, number - 1))
        return self.inside if near else self.between

    def all_reduce(self, members: int, stride: int, size: float) -> float:
        """How long a sum takes over a group of which several members may share a host.

        Those of a host add up their parts first, then parts go round the hosts, then each host
        hands them out: what leaves a host is as small as if it had one member.

        Args:
            members: of the group.
            stride: from a member to the next one, in devices.
            size: what each puts in, in bytes.

        Example:
            >>> network = Network(8, Link(0.0, 1e11), Link(0.0, 1e9))
            >>> network.all_reduce(16, 1, 1e6) < network.all_reduce(16, 8, 1e6)
            True
        """
        here = max(1, min(members, self.host_size // stride))
        if here == members:
            return self.inside.all_reduce(members, size)
        hosts = math.ceil(members / here)
        gather = self.inside.all_gather(here, size / here) if here > 1 else 0.0
        return 2 * gather + self.between.all_reduce(hosts, size / here)
