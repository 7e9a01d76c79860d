"""Waits for the workers of a cluster, and lets spares take the places of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipemesh.errors import DeviceError
from pipemesh.hosts.cluster import Cluster
from pipemesh.hosts.health import Asker, Health
from pipemesh.text import several

_PAUSE = 0.3


def gather(
    cluster: Cluster,
    seconds: float,
    answer: float,
    tell: Callable[[str], object],
    fewer: float | None = None,
    who: str = "worker",
    remedy: str = "start it there with `pipemesh worker`",
) -> tuple[dict[int, str], list[Health]]:
    """Finds who takes which place.

    Args:
        cluster: the workers, and spares.
        seconds: to wait for those that do not answer.
        answer: seconds to wait for one answer; who gives none for so long is replaced by a spare.
        tell: is called with what is worth a line.
        fewer: seconds after which those who are there are enough; None if all are needed.
        who: what one of them is called.
        remedy: what to do about one that is not there.

    Returns:
        The address for each place, by its number, and what was answered there.

    Raises:
        DeviceError: one is not there, and no spare is either.
    """
    every = [*cluster.workers, *cluster.spares]
    asker, begun, told = Asker(every), time.monotonic(), False
    try:
        while True:
            healths = dict(zip(every, asker.ask(answer), strict=True))
            waited = time.monotonic() - begun
            spares = [a for a in cluster.spares if not healths[a].trouble]
            places: dict[int, str] = {}
            missing: list[int] = []
            for number, address in enumerate(cluster.workers):
                if healths[address].trouble and spares and waited >= answer:
                    places[number] = spares.pop(0)
                    continue
                places[number] = address
                if healths[address].trouble:
                    missing.append(number)
            if missing and fewer is not None and waited >= fewer and len(missing) < len(places):
                for number in missing:
                    address = places.pop(number)
                    trouble = healths[address].trouble
                    tell(f"going on without {who} {number} ({address}), which {trouble}")
                missing = []
            if not missing:
                for number, address in places.items():
                    if address != (own := cluster.workers[number]):
                        tell(f"spare {address} takes the place of {who} {number} ({own})")
                return places, [healths[address] for address in places.values()]
            address = places[missing[0]]
            what = f"{who} {missing[0]} ({address}) {healths[address].trouble}"
            if waited >= seconds:
                raise DeviceError(f"{what}, for {waited:.0f} s; {remedy}, or give other addresses")
            if not told:
                tell(f"waiting for {len(missing)} of {len(every)} {several(who)}: {what}")
                told = True
            time.sleep(_PAUSE)
    finally:
        asker.close()
