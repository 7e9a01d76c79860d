"""Which processor of a mesh lies on which host, where devices of several hosts are at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.places import home_of, inner_axes, inner_mesh


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the processors of a mesh lie.

    Attributes:
        places: of each processor the number of its host, and that of its device there.
        crossing: axes inside of a replica along which slices lie on several hosts, so that
            what is exchanged in every layer goes from host to host.
        idle: hosts on which no processor lies.
    """

    places: tuple[tuple[int, int], ...]
    crossing: tuple[str, ...]
    idle: tuple[int, ...]


def over_hosts(mesh: Mesh, layout: LayoutRules, devices: Sequence[int]) -> Places:
    """Spreads a mesh evenly over hosts, such that what is exchanged most often stays on one.

    Stage after stage, in it replica after replica, and in that slice after slice: slices of a layer
    are exchanged in every layer, gradients of replicas once a step, and what goes from stage to
    stage is small. So slices are neighbours, and stages are what hosts are told apart by.

    Args:
        mesh: the mesh.
        layout: its rules.
        devices: how many each host has.

    Raises:
        PlanError: there are fewer devices than the mesh has processors.

    Example:
        >>> mesh = Mesh.from_text("model:2;layers:2")
        >>> over_hosts(mesh, LayoutRules.from_text("d_ff:model"), [4, 4]).places
        ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    wanted = mesh.num_devices
    if wanted > sum(devices):
        raise PlanError(
            f"mesh={mesh}: it has {wanted} processors, but {len(devices)} workers have "
            f"{sum(devices)} devices; use a smaller mesh, or more workers"
        )
    homes = [home_of(mesh, layout, place) for place in range(mesh.num_stages)]
    order = [processor for home in homes for processor in home]
    # Those that idle come last.
    order += [processor for processor in range(wanted) if processor not in set(order)]
    free = [(host, i) for host, n in enumerate(_shares(wanted, devices)) for i in range(n)]
    at = dict(zip(order, free, strict=True))
    places = tuple(at[processor] for processor in range(wanted))
    used = {host for host, _ in places}
    return Places(
        places,
        _crossing(mesh, layout, homes, places),
        tuple(host for host in range(len(devices)) if host not in used),
    )


def _shares(wanted: int, devices: Sequence[int]) -> list[int]:
    """How many of each host's devices are taken: of all as many, as far as they have them."""
    shares = [0] * len(devices)
    while wanted:
        open_hosts = [host for host, there in enumerate(devices) if shares[host] < there]
        # At least one each; the first hosts have what does not divide.
        each, more = divmod(wanted, len(open_hosts))
        for number, host in enumerate(open_hosts):
            taken = min(each + (number < more), devices[host] - shares[host])
            shares[host] += taken
            wanted -= taken
    return shares


def _crossing(
    mesh: Mesh,
    layout: LayoutRules,
    homes: Sequence[Sequence[int]],
    places: Sequence[tuple[int, int]],
) -> tuple[str, ...]:
    """The axes along which a replica's processors lie on several hosts."""
    axes = inner_axes(mesh, layout)
    found: set[str] = set()
    for place, home in enumerate(homes):
        inside = inner_mesh(mesh, layout, place)
        hosts = [places[processor][0] for processor in home]
        # Neighbours along the last axis stand side by side.
        step = 1
        for axis in reversed(axes if inside else []):
            size = inside.size(axis) if inside else 1
            for at, host in enumerate(hosts):
                first = at - at // step % size * step
                if hosts[first] != host:
                    found.add(axis)
            step *= size
    return tuple(axis for axis in axes if axis in found)
