"""Waits for the workers of a cluster, and lets spares take the places of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipemesh.errors import DeviceError
from pipemesh.hosts.cluster import Cluster
from pipemesh.hosts.health import Asker, Health, check_distinct
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
    own: int | None = None,
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
        own: the number of this process, if it is one of them; it is waited for without a word.

    Returns:
        The address for each place, by its number, and what was answered there.

    Raises:
        DeviceError: one is not there, and no spare is either, or two addresses lead to one.
    """
    every = [*cluster.workers, *cluster.spares]
    asker, begun, told = Asker(every), time.monotonic(), False
    try:
        while True:
            healths = dict(zip(every, asker.ask(answer), strict=True))
            check_distinct(healths, who)
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
                    if address != (lost := cluster.workers[number]):
                        tell(f"spare {address} takes the place of {who} {number} ({lost})")
                return places, [healths[address] for address in places.values()]
            others = [number for number in missing if number != own]
            first = (others or missing)[0]
            what = f"{who} {first} ({places[first]}) {healths[places[first]].trouble}"
            if waited >= seconds:
                raise DeviceError(
                    f"{what}, after {waited:.0f} s of waiting; {remedy}, or give other addresses"
                )
            if others and not told:
                tell(f"waiting for {len(others)} of {len(every)} {several(who)}: {what}")
                told = True
            time.sleep(_PAUSE)
    finally:
        asker.close()
