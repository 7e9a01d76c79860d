"""Links, groups of devices, and the hosts that a mesh lies on."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.homes import home_of, inner_axes


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between two devices.

    Attributes:
        latency: seconds from the call until the first byte arrives.
        bandwidth: bytes per second in each direction; infinite if nothing is copied.

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
        """Returns the seconds of sending `size` bytes; 0 for none."""
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce(self, members: int, size: float) -> float:
        """Returns the seconds of an all-reduce over a group.

        The faster of two algorithms counts. A ring sends least, but waits for each member in turn
        (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009). Two trees wait for a logarithm of the members (Sanders, Speck, Traeff, "Two-tree
        algorithms for full bandwidth broadcast, reduction and scan", 2009).

        Args:
            members: number of members of the group.
            size: bytes of each member's input.

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
        """Returns the seconds of an all-gather of `size` bytes from each member, by a ring.

        A reduce-scatter of a sum of `members * size` bytes takes the same time.
        """
        return (members - 1) * self.seconds(size)

    def collective(self, primitive: str, members: int, sent: float) -> float:
        """Returns the seconds of a primitive of `pipemesh.lowering` that sends so many bytes.

        Example:
            >>> link = Link(latency=0.0, bandwidth=1e9)
            >>> link.collective("all_reduce", 4, 1.5e6) == link.all_reduce(4, 1e6)
            True
        """
        if members == 1 or not sent:
            return 0.0
        if primitive == "all_reduce":
            return self.all_reduce(members, reduced_bytes(members, sent))
        steps = 1 if primitive == "permute" else members - 1
        return steps * self.seconds(sent / steps)


@functools.lru_cache(maxsize=256)
def sent_share(primitive: str, members: int) -> Fraction:
    """Returns the share of its input that a member of a group sends, by the usual algorithms."""
    others = members - 1
    return {
        "all_reduce": Fraction(2 * others, members),
        "all_gather": Fraction(others),
        "all_to_all": Fraction(others, members),
        "reduce_scatter": Fraction(others, members),
        "permute": Fraction(1),
    }[primitive]


def sent_bytes(primitive: str, size: int, members: int) -> int:
    """Returns the bytes that a member of a group sends of an input of so many."""
    return int(size * sent_share(primitive, members))


def reduced_bytes(members: int, sent: float) -> float:
    """Returns the bytes of a member's input of an all-reduce in which it sends so many."""
    return sent / float(sent_share("all_reduce", members))


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts and their devices.

    Attributes:
        host_size: number of devices per host.
        inside: the link between two devices of a host.
        between: the link of one device to other hosts while all devices of its host send.

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
        """Returns the link between the ends of a row of `distance` devices."""
        return self.inside if distance <= self.host_size else self.between

    def joining(self, here: int, there: int, number: int) -> Link:
        """Returns the link from `number` devices, the first `here`, to as many from `there` on."""
        host = self.host_size
        near = all((here + i) // host == (there + i) // host for i in (0, number - 1))
        return self.inside if near else self.between

    def all_reduce(self, members: int, stride: int, size: float) -> float:
        """Returns the seconds of an all-reduce over a group whose members may share hosts.

        Members of a host first reduce-scatter their inputs. Then the parts are all-reduced between
        hosts, and each host gathers the results. So a host sends as little as with a single member.
        Of groups that lie on hosts in different ways, the slowest counts.

        Args:
            members: number of members of the group.
            stride: number of devices from a member to the next one.
            size: bytes of each member's input.

        Example:
            >>> network = Network(8, Link(0.0, 1e11), Link(0.0, 1e9))
            >>> network.all_reduce(16, 1, 1e6) < network.all_reduce(16, 8, 1e6)
            True
        """
        return max(
            self._all_reduce(*shares, size)
            for shares in _shares_of(self.host_size, members, stride)
        )

    def collective(self, primitive: str, members: int, stride: int, sent: float) -> float:
        """Returns the seconds of a primitive of `pipemesh.lowering` that sends so many bytes."""
        if primitive == "all_reduce" and members > 1:
            return self.all_reduce(members, stride, reduced_bytes(members, sent))
        return self.link(1 + stride * (members - 1)).collective(primitive, members, sent)

    def _all_reduce(self, hosts: int, here: int, size: float) -> float:
        """Returns the seconds for a group on `hosts` hosts, with `here` members or more on each."""
        if hosts == 1:
            return self.inside.all_reduce(here, size)
        gather = self.inside.all_gather(here, size / here) if here > 1 else 0.0
        return 2 * gather + self.between.all_reduce(hosts, size / here)


@functools.cache
def _shares_of(host: int, members: int, stride: int) -> frozenset[tuple[int, int]]:
    """Returns, for the groups of a mesh on hosts of `host` devices, the number of hosts, and of
    members on the host with the fewest.
    """
    span = members * stride
    shares: set[tuple[int, int]] = set()
    # How groups lie on hosts repeats where both begin at the same device.
    for group in range(host // math.gcd(host, span)):
        for first in range(min(stride, host)):
            begin = group * span + first
            on_host = collections.Counter((begin + i * stride) // host for i in range(members))
            shares.add((len(on_host), min(on_host.values())))
    return frozenset(shares)


@dataclasses.dataclass(frozen=True)
class Places:
    """The positions of a mesh's processors on hosts."""

    places: tuple[tuple[int, int], ...]  # For each processor its host and its device there.
    # Axes inside a replica whose slices lie on several hosts, so that every layer communicates
    # between hosts.
    crossing: tuple[str, ...]
    idle: tuple[int, ...]  # hosts without a processor


def over_hosts(mesh: Mesh, layout: LayoutRules, devices: Sequence[int]) -> Places:
    """Spreads a mesh evenly over hosts, so that the most frequent exchanges stay on one."""
    # The order is stages, then replicas, then slices. Slices of a layer communicate in every layer,
    # gradients of replicas once a step, and a boundary between stages is small. So slices are
    # neighbours, and stages are the first to lie on different hosts.
    wanted = mesh.num_devices
    if wanted > sum(devices):
        raise PlanError(
            f"mesh={mesh}: it has {wanted} processors, but {len(devices)} workers have "
            f"{sum(devices)} devices; use a smaller mesh, or more workers"
        )
    homes = [home_of(mesh, layout, place) for place in range(mesh.num_stages)]
    order = [processor for home in homes for processor in home]
    # Idle devices come last.
    order += [processor for processor in range(wanted) if processor not in set(order)]
    free = [(host, i) for host, n in enumerate(_shares(wanted, devices)) for i in range(n)]
    at = dict(zip(order, free, strict=True))
    places = tuple(at[processor] for processor in range(wanted))
    working = {processor for home in homes for processor in home}

    def crosses(axis: str) -> bool:
        groups = (group for group in mesh.groups([axis]) if group[0] in working)
        return any(len({places[processor][0] for processor in group}) > 1 for group in groups)

    crossing = tuple(filter(crosses, inner_axes(mesh, layout)))
    used = {host for host, _ in places}
    idle = tuple(host for host in range(len(devices)) if host not in used)
    return Places(places, crossing, idle)


def _shares(wanted: int, devices: Sequence[int]) -> list[int]:
    """Returns the number of devices used on each host, as even as their numbers allow."""
    shares = [0] * len(devices)
    while wanted:
        open_hosts = [host for host, count in enumerate(devices) if shares[host] < count]
        # Each host uses at least one device; the first hosts take the remainder.
        even, more = divmod(wanted, len(open_hosts))
        for number, host in enumerate(open_hosts):
            taken = min(even + (number < more), devices[host] - shares[host])
            shares[host] += taken
            wanted -= taken
    return shares
