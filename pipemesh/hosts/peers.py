"""This process as one of several that run the same program and compute together."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

from pipemesh.addresses import (
    check_free,
    host_and_port,
    ips_of,
    is_loopback,
    own_address,
    own_ip,
)
from pipemesh.errors import DeviceError
from pipemesh.hosts import client, watch
from pipemesh.hosts.cluster import EVERYWHERE, LOOPBACK, Cluster
from pipemesh.hosts.gather import gather
from pipemesh.hosts.health import Health, ask
from pipemesh.hosts.rollcall import SECONDS_TO_START, RollCall, Wish
from pipemesh.hosts.roster import Roster, Rosters

# Who has lost one of the others sees it within this time, and begins again himself.
_SETTLED_SECONDS = 1.5
# Between two looks at those that have agreed to take part, and have not started TensorFlow.
_LOOK_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Joined:
    """This process as one of those that have agreed to take part; see `join`.

    Attributes:
        roster: who takes part.
        number: of this process among them.
        call: answers others until TensorFlow does.
        rosters: of the log directory.
    """

    roster: Roster
    number: int
    call: RollCall
    rosters: Rosters

    def superseded(self) -> str:
        """What is said when others have begun again without this process; "" if they have not."""
        try:
            newest = self.rosters.newest()
        except (DeviceError, OSError):
            # A file system may be away for a moment; this is asked again and again.
            return ""
        if newest is None or newest.number <= self.roster.number:
            return ""
        return "other processes have begun again in the meantime"

    def say_ended(self) -> None:
        """Tells those that wait that the training has ended; for the first process."""
        number = self.roster.number + 1
        self.rosters.say(Roster(number, self.roster.cluster, ended=True))


def join(wish: Wish, folder: str) -> Joined | None:
    """Waits until this process takes part, before TensorFlow is loaded.

    Args:
        wish: what it wants of others.
        folder: the log directory, which all share.

    Returns:
        Who takes part; None if the training has ended without this process.

    Raises:
        PipemeshError: see `RollCall.agree`.
    """
    port = check_listens(wish.every[wish.index], wish.listen)
    _say_sources(wish.every, wish.index, wish.listen)
    rosters = Rosters(folder)
    call = RollCall(wish, rosters, client.say)
    try:
        _keep(port, wish.every, wish.listen)
        roster = call.agree()
    except BaseException:
        call.close()
        raise
    if roster is None:
        call.close()
        return None
    number = roster.place_of(call.start)
    assert number is not None
    if not number:
        for line in roster.told():
            client.say(line)
    return Joined(roster, number, call, rosters)


def connect(
    cluster: Cluster,
    process: int,
    *,
    kind: str = "CPU",
    listen: str | None = None,
    answer: float = 5.0,
    wait: float = 600.0,
    again: bool = False,
    step_limit: float | None = None,
    joined: Joined | None = None,
) -> None:
    """Connects this process with the others, and watches them from now on.

    To be called before TensorFlow's first operation, with this process's own devices set up.

    Args:
        cluster: where all processes listen; its workers are the processes.
        process: the number of this one.
        kind: of the devices that compute.
        listen: the address by which others reach this process, `0.0.0.0` for any; None if all of
            them are on this machine.
        answer: seconds in which another one has to say that it is there; it is asked twice.
        wait: seconds to wait for those that are not there.
        again: whether this program is to be begun again when another one is lost.
        step_limit: seconds after which it is said of a step that it does not end; after twice as
            many another one is taken for lost. By default it depends on the steps before.
        joined: where processes have agreed on who takes part: of them.

    Raises:
        DeviceError: another one is not there, this one may not listen where it is to, or TensorFlow
            has started.
    """
    from pipemesh.backend.processes import connect_processes

    addresses = cluster.workers
    if not 0 <= process < len(addresses):
        raise DeviceError(
            f"this is process {process}, but there are {len(addresses)} addresses; numbers begin "
            "with 0"
        )
    own = addresses[process]
    visitors: Sequence[str] = addresses
    if joined is not None:
        named = joined.roster.cluster
        visitors = [*named.workers, *named.spares]
        joined.call.close()
    else:
        _say_sources(addresses, process, listen)
    port = check_listens(own, listen)
    connect_processes(addresses, process, kind)
    _keep(port, visitors, listen)
    while True:
        if joined is not None:
            places, healths = _gather_joined(joined, cluster, answer)
        else:
            places, healths = gather(
                cluster,
                wait,
                answer,
                lambda text: client.say(f"process {process} ({own}): {text}"),
                who="process",
                remedy="start it there",
                own=process,
            )
        starts = [health.start for health in healths]
        # One of an earlier attempt may still be there, which has not seen yet that others are not.
        time.sleep(_SETTLED_SECONDS)
        if [health.start for health in ask(addresses, answer)] == starts:
            break
    watched = watch.Watch(
        places,
        starts,
        answer,
        client.begin_again if again else client.end,
        limit=step_limit,
        tell=client.say if not process else _nothing,
        who="process",
    )
    watched.also = joined.superseded if joined is not None else None
    watched.start()
    watch.make_current(watched)
    is_whole = joined is None or not joined.roster.plan
    if client.has_begun_again() and not process and is_whole:
        client.say("all processes are there")


def _gather_joined(
    joined: Joined, cluster: Cluster, answer: float
) -> tuple[dict[int, str], list[Health]]:
    """Waits for those that have agreed to take part; begins again if one cannot any more."""
    limit = time.monotonic() + SECONDS_TO_START
    starts = [each.start for each in joined.roster.members]
    while True:
        try:
            return gather(cluster, _LOOK_SECONDS, answer, _nothing, who="process")
        except DeviceError as error:
            # One that waits to take part in what comes next was started again.
            found = [health.waits for health in ask(cluster.workers, answer)]
            again = [n for n, waits in enumerate(found) if waits and waits != starts[n]]
            if again:
                address = cluster.workers[again[0]]
                client.begin_again(f"process {again[0]} ({address}) was started again")
            if told := joined.superseded():
                client.begin_again(told)
            if time.monotonic() >= limit:
                client.begin_again(str(error))


def _nothing(_: str) -> None:
    """Of a step that hangs the first process speaks for all."""


def check_listens(own: str, listen: str | None) -> int:
    """Checks that a process can listen at its address; to be called before TensorFlow is loaded.

    Args:
        own: its `host:port`.
        listen: see `connect`.

    Returns:
        The port.

    Raises:
        DeviceError: it cannot, or others reach it though nothing says that they may.
    """
    host, port = host_and_port(own)
    if listen is None and not all(map(is_loopback, ips_of([own]))):
        raise DeviceError(
            f"other machines are to reach this process as {own}; TensorFlow asks nobody for a "
            f"password, so say that they may: --listen={host}, an address of a private network"
        )
    if listen is not None and listen not in EVERYWHERE:
        own_ip(listen, f"--listen={listen}")
    check_free(port, own, "give this process another port")
    return port


def _say_sources(addresses: Sequence[str], process: int, listen: str | None) -> None:
    """Says of which others this process comes from an address that they may not let in."""
    if listen is None or listen in EVERYWHERE:
        return
    own = addresses[process]
    known = ips_of([own])
    for number, other in enumerate(addresses):
        with contextlib.suppress(DeviceError):
            source = host_and_port(own_address(other))[0]
            if number != process and source not in known and not is_loopback(source):
                client.say(
                    f"process {process} ({own}) comes to process {number} ({other}) from {source}, "
                    "which is let in there only with --listen=0.0.0.0; if it does not answer, "
                    f"name this process by {source} in --cluster"
                )


def _keep(port: int, addresses: Sequence[str], listen: str | None) -> None:
    """Lets nobody but the other processes reach this one."""
    from pipemesh.backend.address_filter import keep_to

    if listen in EVERYWHERE:
        return
    if listen is None:
        keep_to(port, [LOOPBACK])
    else:
        keep_to(port, [*ips_of(addresses), LOOPBACK], peers=True)
