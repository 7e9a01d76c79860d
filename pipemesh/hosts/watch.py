"""Watches workers while a client drives them, so that one that is lost is noticed in seconds.

What TensorFlow runs on a worker that is stopped, or cut off without a word, it waits for as long as
it takes. So a thread asks each worker again and again whether it is there, and says so if not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pipemesh.hosts.health import Health

# Between two questions.
_PAUSE = 0.5


class Watch:
    """Asks workers how they are.

    Args:
        addresses: `host:port` of each.
        starts: the number that each said it was started with.
        seconds: to wait for an answer; without one it is asked once more.
        lost: is called with what is to be said, and what nobody has finished, from whatever thread
            noticed it. It does not return.
        who: what one of them is called.

    Attributes:
        doing: what the client is about, in words.
        stages: what is said of each worker, such as "stage 1".
        steps: how many steps were finished.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        starts: Sequence[int],
        seconds: float,
        lost: Callable[[str], NoReturn],
        who: str = "worker",
    ) -> None:
        self.doing, self.steps = "making the model", 0
        self.stages: dict[int, str] = {}
        self._since = time.monotonic()
        self._addresses, self._starts = list(addresses), list(starts)
        self._seconds, self._lost, self._who = seconds, lost, who
        # The module loads gRPC, which programs without workers do not need.
        from pipemesh.hosts.health import Asker

        self._asker = Asker(addresses)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of workers", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; returns when nothing is asked any more."""
        self._ended.set()
        self._thread.join()
        self._asker.close()

    def begin(self, doing: str) -> None:
        """Notes what the client is about from now on.

        Args:
            doing: in words, such as "step 3".
        """
        self.doing, self._since = doing, time.monotonic()

    def check(self) -> None:
        """Asks now, whoever has reason to think that a worker is lost; if so, says so."""
        if (found := self._trouble()) and not self._ended.is_set():
            with self._lock:
                self._lost(found)

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE):
            self.check()

    def _trouble(self) -> str | None:
        """What is wrong with the first worker that is lost."""
        first = self._asker.ask(self._seconds)
        if all(map(self._is_well, first, self._starts)):
            return None
        # This process may have been stopped itself, or its network for a moment.
        second = self._asker.ask(self._seconds)
        for number, (health, start) in enumerate(zip(second, self._starts, strict=True)):
            if not self._is_well(health, start):
                return self._told(number, health)
        return None

    @staticmethod
    def _is_well(health: Health, start: int) -> bool:
        return not health.trouble and health.start == start

    def _told(self, number: int, health: Health) -> str:
        what = health.trouble or "was started again"
        stages = self.stages.get(number)
        lies = f", {stages}" if stages else ""
        since = time.monotonic() - self._since
        return (
            f"{self._who} {number} ({self._addresses[number]}{lies}) {what}, "
            f"in {self.doing}, begun {since:.1f} s ago"
        )


_current: Watch | None = None


def current() -> Watch | None:
    """The one of this process; None if it drives no workers."""
    return _current


def make_current(watch: Watch | None) -> None:
    """Lets a watch be that of this process."""
    global _current
    _current = watch


def begin(doing: str) -> None:
    """Notes what this process is about from now on.

    Args:
        doing: in words, such as "step 3".
    """
    if _current is not None:
        _current.begin(doing)


def end_step() -> None:
    """Notes that a step was finished."""
    if _current is not None:
        _current.steps += 1
        _current.begin("what follows a step")


def stop() -> None:
    """Ends the watch of this process, if it has one."""
    if _current is not None:
        _current.stop()
        make_current(None)


def check_workers() -> None:
    """Asks the workers of this process, if it has some, whether all are there."""
    if _current is not None:
        _current.check()
