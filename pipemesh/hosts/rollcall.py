"""Several processes agree on which of them take part, before TensorFlow starts in any of them.

TensorFlow fixes who computes together when its server starts. Before that, each process answers on
its own port, as a server of TensorFlow would, that it waits; the first of those that wait says who
takes part (`pipemesh.hosts.roster`), and all who wait read what counts.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from pipemesh.errors import DeviceError
from pipemesh.hosts.cluster import Cluster
from pipemesh.hosts.health import QUESTION, Asker, Health, answer_of_waiting, check_distinct
from pipemesh.hosts.roster import Member, Roster, Rosters

_PAUSE = 0.2
# Who takes part is to have started its server after so long.
SECONDS_TO_START = 180.0
# Those that are started at the same time come within this.
_SECONDS_TO_COME = 1.0
# Calls that are under way may end for so long; others would see one that is broken off.
_SECONDS_TO_CLOSE = 1.0
# From how many there are to how many of them take part, and by which plan.
Fit = Callable[[int], tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a process wants of others.

    Attributes:
        cluster: all processes, and spares.
        index: of this one among all, spares behind the others.
        answer: seconds in which one has to say that it is there.
        patience: seconds for which one has to be missing, while nobody trains, before a spare takes
            its place, or the others go on without it.
        limit: seconds after which it is an error that one is missing.
        fit: how many of so many processes go on, under which plan; raises a `PipemeshError` if none
            can. None if all are needed.
        listen: the address by which others reach this process; None for this machine alone.
    """

    cluster: Cluster
    index: int
    answer: float
    patience: float
    limit: float
    fit: Fit | None = None
    listen: str | None = None

    @property
    def every(self) -> tuple[str, ...]:
        """The addresses of all."""
        return (*self.cluster.workers, *self.cluster.spares)


class RollCall:
    """This process among those that wait to take part; a context manager.

    Args:
        wish: what it wants of others.
        rosters: of the log directory.
        tell: is called with what is worth a line.

    Raises:
        DeviceError: it cannot listen where others ask it.

    Attributes:
        start: the text that stands for this process in a roster.
    """

    def __init__(self, wish: Wish, rosters: Rosters, tell: Callable[[str], object]) -> None:
        self.start = secrets.token_hex(8)
        self._wish, self._rosters, self._tell = wish, rosters, tell
        self._name = Roster(0, wish.cluster).name
        # Before others see this process, which may say at once that it takes part.
        self._base = rosters.newest()
        # When others trained last, and when nobody did, or all that take part.
        self._since = self._whole = time.monotonic()
        self._told: set[str] = set()
        self._takes_part_since: float | None = None
        self._server = _serve(wish, self._answer)

    def __enter__(self) -> RollCall:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Frees the port, for TensorFlow's server."""
        self._server.stop(_SECONDS_TO_CLOSE).wait()

    def agree(self) -> Roster | None:
        """Waits until this process takes part.

        A spare, and one that comes when others have begun without it, waits as long as these train,
        and takes part when they begin again.

        Returns:
            The roster that counts; None if the training has ended without this process.

        Raises:
            DeviceError: others are missing for too long, or another training has the folder.
            PipemeshError: no plan goes with those that are there.
        """
        asker = Asker(self._wish.every)
        self._since = self._whole = time.monotonic()
        try:
            while (found := self._news()) is None:
                answers = asker.ask(self._wish.answer)
                check_distinct(dict(zip(self._wish.every, answers, strict=True)))
                healths = dict(enumerate(answers))
                busy = self._busy(healths)
                if self._base is not None and self._base.members and busy:
                    self._wait_for(busy, self._base)
                else:
                    self._whole = time.monotonic()
                    self._say_who(healths)
                time.sleep(_PAUSE)
        finally:
            asker.close()
        return None if found.ended else found

    def _news(self) -> Roster | None:
        """A new roster that has this process, or says that the training has ended; else None."""
        found, base = self._rosters.newest(), self._base
        if found is None or (base is not None and found.number <= base.number):
            return None
        if found.cluster != self._wish.cluster:
            raise DeviceError(
                f"logdir={self._rosters.folder!r}: another training has begun there, of "
                f"{', '.join(found.cluster.workers)}; give another folder"
            )
        if found.place_of(self.start) is not None:
            self._takes_part_since = time.monotonic()
            return found
        if found.ended:
            self._tell(f"the training has ended, and {self._name(self._wish.index)} with it")
            return found
        self._base, self._since = found, time.monotonic()
        return None

    def _wait_for(self, busy: list[int], base: Roster) -> None:
        """Waits while others train; who has lost one of theirs is to notice that."""
        self._since = time.monotonic()
        self._tell_once("late", self._late(base))
        if all(each.index in busy for each in base.members):
            self._whole = self._since
        waited = self._since - self._whole
        if waited >= self._wish.limit + 4 * self._wish.answer:
            what = "computes with others that are gone, and does not begin again"
            self._give_up(busy[0], what, waited)

    def _say_who(self, healths: dict[int, Health]) -> None:
        """Says who takes part, if that is up to this process and it is time."""
        cluster, base = self._wish.cluster, self._base
        here = {i: health.waits for i, health in healths.items() if health.waits}
        here[self._wish.index] = self.start
        waited = time.monotonic() - self._since
        if self._wish.index != min(here):
            if waited >= self._wish.limit + 2 * self._wish.answer:
                self._give_up(min(here), "is there, and has not said who takes part", waited)
            return
        missing = [i for i in range(len(cluster.workers)) if i not in here]
        if said := self._proposed(base.number + 1 if base else 1, here, missing, waited, healths):
            if base is None or base.cluster != cluster:
                self._rosters.check_free()
            # If somebody was faster, that counts.
            self._rosters.say(said)
        elif missing and waited >= _SECONDS_TO_COME:
            told = f"{self._name(missing[0])} {healths[missing[0]].trouble}"
            own, number = self._name(self._wish.index), len(cluster.workers)
            self._tell_once(
                "missing", f"{own} waits for {len(missing)} of {number} processes: {told}"
            )

    def _busy(self, healths: dict[int, Health]) -> list[int]:
        """Those that train, or are about to."""
        return [
            index
            for index, health in healths.items()
            if index != self._wish.index and (health.takes_part or not health.trouble)
        ]

    def _late(self, base: Roster) -> str:
        name = self._name(self._wish.index)
        if self._wish.index >= len(self._wish.cluster.workers):
            return f"{name} waits until a process is lost"
        if any(each.index == self._wish.index for each in base.members):
            return f"{name} waits until the others have noticed that it was gone"
        names = " and ".join(self._name(each.index) for each in base.members)
        return (
            f"{name} comes too late: {names} went on without it; it waits, and takes part when all "
            "begin again"
        )

    def _proposed(
        self,
        number: int,
        here: dict[int, str],
        missing: list[int],
        waited: float,
        healths: dict[int, Health],
    ) -> Roster | None:
        """Who is to take part, in the eyes of this process; None to wait."""
        cluster = self._wish.cluster
        count = len(cluster.workers)
        places = {place: place for place in range(count) if place in here}
        if missing:
            if waited < self._wish.patience:
                return None
            spares = [i for i in sorted(here) if i >= count]
            places |= dict(zip(missing, spares, strict=False))
        plan = ""
        if len(places) < count:
            one = next(place for place in range(count) if place not in places)
            if self._wish.fit is None:
                if waited < self._wish.limit:
                    return None
                none = ", and no spare is there" if cluster.spares else ""
                self._give_up(one, f"{healths[one].trouble}{none}", waited)
            kept, plan = self._wish.fit(len(places))
            places = dict(sorted(places.items())[:kept])
        members = tuple(
            Member(index, here[index], place) for place, index in sorted(places.items())
        )
        return Roster(number, cluster, members, plan)

    def _give_up(self, index: int, what: str, waited: float) -> NoReturn:
        raise DeviceError(
            f"{self._name(self._wish.index)} waits for {self._name(index)}, which "
            f"{what}, for {waited:.0f} s; start it there, or give other addresses"
        )

    def _tell_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._tell(text)

    def _answer(self) -> bytes:
        since = self._takes_part_since
        if since is not None and time.monotonic() - since > SECONDS_TO_START:
            return answer_of_waiting("", False)
        return answer_of_waiting(self.start, since is not None)


def _serve(wish: Wish, answer: Callable[[], bytes]) -> grpc.Server:
    """A server that answers how this process is."""
    own = wish.every[wish.index]
    port = own.rpartition(":")[2]
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(4),
        handlers=[_Handler(answer)],
        options=[("grpc.so_reuseport", 0)],
    )
    where = own
    if wish.listen is not None:
        where = f"[{wish.listen}]:{port}" if ":" in wish.listen else f"{wish.listen}:{port}"
    try:
        server.add_insecure_port(where)
    except RuntimeError as error:
        raise DeviceError(
            f"{where}: this process cannot listen there ({error}); give it another port"
        ) from error
    server.start()
    return server


class _Handler(grpc.GenericRpcHandler):
    """Answers the question that servers of TensorFlow answer, too."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        self._answer = answer

    def service(self, handler_call_details: Any) -> Any:
        """The answer to this question; None for any other."""
        if handler_call_details.method != QUESTION:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer())
