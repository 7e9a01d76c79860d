"""Waits until all workers of a cluster are there, and lets spares take the places of others."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipemesh.errors import DeviceError
from pipemesh.hosts.cluster import Cluster
from pipemesh.hosts.health import Asker, Health

_PAUSE = 0.3


def gather(
    cluster: Cluster,
    seconds: float,
    answer: float,
    tell: Callable[[str], object],
    who: str = "worker",
    remedy: str = "start it there with `pipemesh worker`",
) -> tuple[tuple[str, ...], list[Health]]:
    """Finds who takes which place.

    Args:
        cluster: the workers, and spares.
        seconds: to wait for those that do not answer.
        answer: seconds to wait for one answer; who gives none for so long is replaced by a spare.
        tell: is called with what is worth a line.
        who: what one of them is called.
        remedy: what to do about one that is not there.

    Returns:
        The address for each place, and what was answered there.

    Raises:
        DeviceError: one is not there, and no spare is either.
    """
    every = [*cluster.workers, *cluster.spares]
    whos = "processes" if who == "process" else f"{who}s"
    asker, begun, told = Asker(every), time.monotonic(), False
    try:
        while True:
            healths = dict(zip(every, asker.ask(answer), strict=True))
            waited = time.monotonic() - begun
            spares = [a for a in cluster.spares if not healths[a].trouble]
            places: list[str] = []
            missing: list[int] = []
            for number, address in enumerate(cluster.workers):
                if healths[address].trouble and spares and waited >= answer:
                    places.append(spares.pop(0))
                    continue
                places.append(address)
                if healths[address].trouble:
                    missing.append(number)
            if not missing:
                for number, (address, own) in enumerate(zip(places, cluster.workers, strict=True)):
                    if address != own:
                        tell(f"spare {address} takes the place of {who} {number} ({own})")
                return tuple(places), [healths[address] for address in places]
            first = missing[0]
            what = f"{who} {first} ({places[first]}) {healths[places[first]].trouble}"
            if waited >= seconds:
                raise DeviceError(f"{what}, for {waited:.0f} s; {remedy}, or give other addresses")
            if not told:
                tell(f"waiting for {len(missing)} of {len(every)} {whos}: {what}")
                told = True
            time.sleep(_PAUSE)
    finally:
        asker.close()
