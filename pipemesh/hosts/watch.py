"""A thread that watches workers while a client drives them, and notices a lost one in seconds.

TensorFlow waits without limit for a worker that is stopped or silently cut off. The watch asks each
worker every half second. If all answer and a step still does not end, it reports which device waits
for which action.
"""

from __future__ import annotations

import collections
import contextlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from pipemesh.hosts.health import Health

# Seconds between two requests.
_PAUSE = 0.5
# The limit of a step as a multiple of the median step, its minimum in seconds, and the limit of the
# first steps and of other work, which may build graphs.
_TIMES, _LEAST, _FIRST = 20.0, 60.0, 1200.0
_FEWEST = 3
_REMEMBERED = 50
# Codes of TensorFlow and gRPC for a broken connection between workers. The part of a step that
# noticed it is unavailable, the other parts are cancelled.
_CANCELLED, _UNAVAILABLE = 1, 14
_IN_TEXT = f"grpc_status:{_UNAVAILABLE}"
# The worker in these texts from which a tensor, or its part of a step, was requested.
_ASKED = re.compile(
    r"remote target /job:(\w+)/replica:0/task:(\d+)\S* while calling /tensorflow\.(\S*?)Service/"
)
# Lines that do not concern a connection.
_NO_REASON = re.compile(r"Graph execution error|Detected at node|<stack traces|\d+ root error|$")
# Number of retries, with pauses, after an error of the watch itself.
_MOST_FAILURES = 20


class Progress(Protocol):
    """The progress of the workers' devices in the current step."""

    def look(self) -> None:
        """Asks the workers for their progress, without waiting."""
        ...

    def waits(self) -> dict[int, list[str]]:
        """Returns the current action of each unfinished device as text, by worker."""
        ...


class Watch:
    """A thread that asks workers for their state, and calls `lost`, which does not return, after a
    loss or a step of twice `limit`.
    """

    def __init__(
        self,
        places: Mapping[int, str],
        starts: Sequence[int],
        seconds: float,
        lost: Callable[[str], NoReturn],
        limit: float | None = None,
        tell: Callable[[str], object] = print,
    ) -> None:
        # A worker that gives no answer in `seconds` is asked once more; `limit` is that of a step,
        # by default a multiple of the steps before.
        self.doing, self.steps = "making the model", 0
        self.stages: dict[int, str] = {}
        self.progress: Progress | None = None
        self._since = time.monotonic()
        # Whether the current work is a step, has a time limit, and was reported as blocked.
        self._is_step, self._is_limited, self._is_told = False, False, False
        # The time limit of the current work, if it differs from the default.
        self._most: float | None = None
        self._taken: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._names = [f"worker {number} ({address})" for number, address in places.items()]
        self._starts = list(starts)
        self._seconds, self._lost, self._limit, self._tell = seconds, lost, limit, tell
        # This loads gRPC, which programs without workers do not need.
        from pipemesh.hosts.health import Asker

        self._asker = Asker(list(places.values()))
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of workers", daemon=True)

    def start(self) -> None:
        """Starts to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stops; returns when no request is pending."""
        self._ended.set()
        self._thread.join()
        self._asker.close()

    def begin(self, doing: str, is_step: bool = False) -> None:
        """Sets the current work of the client, as text; a step has a time limit."""
        self._is_told = False
        self.doing, self._since = doing, time.monotonic()
        self._is_step = self._is_limited = is_step
        self._most = None

    @contextlib.contextmanager
    def during(self, doing: str, limit: float | None = None) -> Iterator[None]:
        """Sets the current work of the client inside a context, with a time limit in seconds; the
        default leaves time to build graphs.
        """
        before = self.doing, self._since, self._is_step, self._is_limited, self._most
        self.begin(doing)
        self._is_limited, self._most = True, limit
        try:
            yield
        finally:
            self.doing, self._since, self._is_step, self._is_limited, self._most = before

    def end_step(self) -> None:
        """Notes that a step was finished."""
        self.steps += 1
        self._taken.append(time.monotonic() - self._since)
        self.begin("what follows a step")

    def name(self, task: int) -> str:
        """Returns number, address and stages of a worker."""
        stages = self.stages.get(task)
        return f"{self._names[task][:-1]}, {stages})" if stages else self._names[task]

    def check(self, error: BaseException | None = None) -> None:
        """Asks all workers now, and calls `lost` if one is lost, or if `error` reports a broken
        connection although all answer.
        """
        message = self._trouble()
        if not message and (broken := self._broken_connection(error)):
            since = time.monotonic() - self._since
            message = f"a connection broke in {self.doing}, begun {since:.1f} s ago ({broken})"
            message = "\n".join([message, *_indented(self._waits())])
        if message and not self._ended.is_set():
            with self._lock:
                self._lost(message)

    def _run(self) -> None:
        """Watches until it is stopped, whatever fails, so that no lost worker is unnoticed."""
        failures = 0
        while not self._ended.wait(_PAUSE):
            try:
                self.check()
                self._check_progress()
                failures = 0
            except Exception as error:
                failures += 1
                message = f"the watch of workers fails ({type(error).__name__}: {error})"
                with contextlib.suppress(Exception):
                    if failures == 1:
                        self._tell(f"{message}; it tries again")
                    elif failures >= _MOST_FAILURES:
                        self._lost(message)

    def _check_progress(self) -> None:
        """Reads the progress of a long step, and reports or abandons one that is too long."""
        lasted = time.monotonic() - self._since
        if not self._is_limited or lasted < _PAUSE:
            return
        if self.progress is not None and self._is_step:
            # Read it now: a worker that gets lost later cannot be asked.
            self.progress.look()
        limit = self.limit
        if lasted < limit or self._ended.is_set():
            return
        if not self._is_told:
            self._is_told = True
            lines = _indented(self._waits())
            unfinished = ", and all workers answer; unfinished devices:" if lines else ""
            message = f"{self.doing} has lasted for {lasted:.0f} s{unfinished}"
            self._tell("\n".join([message, *lines]))
        elif lasted >= 2 * limit:
            with self._lock:
                self._lost(f"{self.doing} does not end: it has lasted for {lasted:.0f} s")

    @property
    def limit(self) -> float:
        """Returns the seconds after which the current work is reported as blocked."""
        if self._most is not None:
            return self._most
        if not self._is_step or len(self._taken) < _FEWEST:
            return max(_FIRST, self._limit or 0.0)
        return self._limit or max(_LEAST, _TIMES * statistics.median(self._taken))

    def _waits(self) -> dict[int, list[str]]:
        return self.progress.waits() if self.progress is not None and self._is_step else {}

    def _trouble(self) -> str | None:
        """Returns a message about the first lost worker; None if all answer."""
        first = self._asker.ask(self._seconds)
        if all(map(self._is_well, first, self._starts)):
            return None
        # This process, or its network, may have been stopped for a moment. A killed worker refuses
        # connections by then.
        self._ended.wait(_PAUSE)
        second = self._asker.ask(self._seconds)
        for number, (health, start) in enumerate(zip(second, self._starts, strict=True)):
            if not self._is_well(health, start):
                return self._message(number, health)
        return None

    @staticmethod
    def _is_well(health: Health, start: int) -> bool:
        return not health.trouble and health.start == start

    def _message(self, task: int, health: Health) -> str:
        trouble = health.trouble or "was started again"
        since = time.monotonic() - self._since
        message = f"{self.name(task)} {trouble}, in {self.doing}, begun {since:.1f} s ago"
        waits = self._waits()
        if task in waits:
            message += f"; {'; '.join(waits.pop(task))}"
        return "\n".join([message, *_indented(waits)])

    def _broken_connection(self, error: BaseException | None) -> str:
        """Describes the broken connection in an error or its cause; "" if there is none."""
        while error is not None:
            text, code = str(error), getattr(error, "error_code", None)
            # Between workers the code is gRPC's, and only the text has it.
            if code in (_CANCELLED, _UNAVAILABLE) or _IN_TEXT in text:
                names: dict[str, str] = {}
                for job, task, service in _ASKED.findall(text):
                    is_named = job == "worker" and int(task) < len(self._names)
                    name = self.name(int(task)) if is_named else "this process"
                    names.setdefault(service, name)
                lines = [line.strip() for line in text.split("Additional GRPC", 1)[0].split("\n")]
                reasons = [line for line in lines if not _NO_REASON.match(line)] or ["cancelled"]
                reason = reasons[0].rpartition("last error: ")[2]
                reason = re.sub(r"^(\(\d+\) )?[A-Z_]+: +", "", reason)[:200]
                asking, asked = names.get("eager.Eager"), names.get("Worker")
                whom = f" from {asked}" if asked else ""
                return f"{asking or 'one'} got no answer{whom}: {reason}" if names else reason
            error = error.__cause__
        return ""


def _indented(waits: Mapping[int, Sequence[str]]) -> list[str]:
    return [f"  {line}" for lines in waits.values() for line in lines]


_current: Watch | None = None


def current() -> Watch | None:
    """Returns the watch of this process; None if it drives no workers."""
    return _current


def make_current(watch: Watch | None) -> None:
    """Sets the watch of this process."""
    global _current
    _current = watch


def begin(doing: str, is_step: bool = False) -> None:
    """Sets the current work of this process; see `Watch.begin`."""
    if _current is not None:
        _current.begin(doing, is_step)


def during(doing: str) -> contextlib.AbstractContextManager[None]:
    """Sets the current work of this process inside a context; see `Watch.during`."""
    return contextlib.nullcontext() if _current is None else _current.during(doing)


def end_step() -> None:
    """Notes that a step was finished."""
    if _current is not None:
        _current.end_step()


def check_workers(error: BaseException | None = None) -> None:
    """Checks that all workers of this process, if any, answer; see `Watch.check`."""
    if _current is not None:
        _current.check(error)
