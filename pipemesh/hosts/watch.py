"""Watches workers while a client drives them, so that one that is lost is noticed in seconds.

What TensorFlow runs on a worker that is stopped, or cut off without a word, it waits for as long as
it takes. So a thread asks each worker again and again whether it is there, and says so if not. Of a
step that does not end though all are there it says who waits for whom.
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

from pipemesh.hosts import children

if TYPE_CHECKING:
    from pipemesh.hosts.health import Health

# Between two questions.
_PAUSE = 0.5
# A step may take so many times the median of those before, and at least so many seconds. One before
# which there are too few, and whatever is no step, may have to build graphs.
_TIMES, _LEAST, _FIRST = 20.0, 60.0, 1200.0
_FEWEST = 3
_REMEMBERED = 50
# TensorFlow's codes, and gRPC's, of a worker that another one lost: of its own part of a step, and
# of the parts that ended with it.
_CANCELLED, _UNAVAILABLE = 1, 14
_IN_TEXT = f"grpc_status:{_UNAVAILABLE}"
# In the same texts: which of them was asked for a tensor, or for its part of a step.
_ASKED = re.compile(
    r"remote target /job:(\w+)/replica:0/task:(\d+)\S* while calling /tensorflow\.(\S*?)Service/"
)
# Lines that say nothing of a connection.
_NO_REASON = re.compile(r"Graph execution error|Detected at node|<stack traces|\d+ root error|$")
# The watch tries again so often, with a pause between, when it fails itself.
_MOST_FAILURES = 20


class Progress(Protocol):
    """Knows how far the devices of workers have come in what is under way."""

    def look(self) -> None:
        """Asks them, and waits for nobody."""
        ...

    def waits(self) -> dict[int, list[str]]:
        """By the task of a worker, what its devices are about that are not done."""
        ...


class Watch:
    """Asks workers how they are.

    Args:
        places: `host:port` of each, by its number among all that were named.
        starts: the number that each said it was started with.
        seconds: to wait for an answer; without one it is asked once more.
        lost: is called with what is to be said, and what nobody has finished, from whatever thread
            noticed it. It does not return.
        limit: seconds after which a step is said to hang, and after twice as many taken for lost;
            by default a multiple of those that steps take.
        tell: is called with what is worth a line.
        who: what one of them is called.

    Attributes:
        doing: what the client is about, in words.
        stages: what is said of each worker, by its task, such as "stage 1".
        progress: knows what workers are about; None if nothing does.
        also: says what else has become of those that compute together; "" if nothing.
        steps: how many steps were finished.
    """

    def __init__(
        self,
        places: Mapping[int, str],
        starts: Sequence[int],
        seconds: float,
        lost: Callable[[str], NoReturn],
        limit: float | None = None,
        tell: Callable[[str], object] = print,
        who: str = "worker",
    ) -> None:
        self.doing, self.steps = "making the model", 0
        self.stages: dict[int, str] = {}
        self.progress: Progress | None = None
        self.also: Callable[[], str] | None = None
        self._since = time.monotonic()
        # Whether what is under way is a step, has a limit, and was said to hang.
        self._is_step, self._is_limited, self._is_told = False, False, False
        # A limit of its own.
        self._most: float | None = None
        self._taken: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._names = [f"{who} {number} ({address})" for number, address in places.items()]
        self._starts = list(starts)
        self._seconds, self._lost, self._limit, self._tell = seconds, lost, limit, tell
        # The module loads gRPC, which programs without workers do not need.
        from pipemesh.hosts.health import Asker

        self._asker = Asker(list(places.values()))
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

    def begin(self, doing: str, is_step: bool = False) -> None:
        """Notes what the client is about from now on.

        Args:
            doing: in words, such as "step 3".
            is_step: whether it is a step, which is not to last longer than others.
        """
        self._is_told = False
        self.doing, self._since = doing, time.monotonic()
        self._is_step = self._is_limited = is_step
        self._most = None

    @contextlib.contextmanager
    def during(self, doing: str, limit: float | None = None) -> Iterator[None]:
        """Notes what the client is about while the context lasts, which is not to last for ever.

        Args:
            doing: in words, such as "evaluation".
            limit: seconds after which it is said to hang; by default graphs may be built.
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
        if self.steps == 1:
            children.say_finished_step()
        self._taken.append(time.monotonic() - self._since)
        self.begin("what follows a step")

    def name(self, task: int) -> str:
        """Number and address of a worker, and which stages lie there.

        Args:
            task: of the worker.
        """
        stages = self.stages.get(task)
        return f"{self._names[task][:-1]}, {stages})" if stages else self._names[task]

    def check(self, error: BaseException | None = None) -> None:
        """Asks now, whoever has reason to think that a worker is lost; if so, says so.

        Args:
            error: the reason. If all workers answer and it says that a connection broke, they have
                lost each other for a moment, and what was under way with it.
        """
        found = (self.also() if self.also is not None else "") or self._trouble()
        if not found and (broken := self._broken_connection(error)):
            since = time.monotonic() - self._since
            found = f"a connection broke in {self.doing}, begun {since:.1f} s ago ({broken})"
            found = "\n".join([found, *_indented(self._waits())])
        if found and not self._ended.is_set():
            with self._lock:
                self._lost(found)

    def _run(self) -> None:
        """Watches until it is stopped.

        A thread that ended by an error would leave a lost worker unnoticed, and the client waiting
        for it for ever.
        """
        failures = 0
        while not self._ended.wait(_PAUSE):
            try:
                self.check()
                self._check_progress()
                failures = 0
            except Exception as error:
                failures += 1
                what = f"the watch of workers fails ({type(error).__name__}: {error})"
                with contextlib.suppress(Exception):
                    if failures == 1:
                        self._tell(f"{what}; it tries again")
                    elif failures >= _MOST_FAILURES:
                        self._lost(what)

    def _check_progress(self) -> None:
        """Asks how far a step is that has lasted, and says so when it has lasted too long."""
        lasted = time.monotonic() - self._since
        if not self._is_limited or lasted < _PAUSE:
            return
        if self.progress is not None and self._is_step:
            # Who is lost in the next moment cannot be asked then.
            self.progress.look()
        limit = self.limit
        if lasted < limit or self._ended.is_set():
            return
        if not self._is_told:
            self._is_told = True
            lines = _indented(self._waits())
            about = ", and all workers answer; of those that are not done:" if lines else ""
            self._tell("\n".join([f"{self.doing} has lasted for {lasted:.0f} s{about}", *lines]))
        elif lasted >= 2 * limit:
            with self._lock:
                self._lost(f"{self.doing} does not end: it has lasted for {lasted:.0f} s")

    @property
    def limit(self) -> float:
        """After how many seconds what is under way is said to hang."""
        if self._most is not None:
            return self._most
        if not self._is_step or len(self._taken) < _FEWEST:
            return max(_FIRST, self._limit or 0.0)
        return self._limit or max(_LEAST, _TIMES * statistics.median(self._taken))

    def _waits(self) -> dict[int, list[str]]:
        return self.progress.waits() if self.progress is not None and self._is_step else {}

    def _trouble(self) -> str | None:
        """What is wrong with the first worker that is lost."""
        first = self._asker.ask(self._seconds)
        if all(map(self._is_well, first, self._starts)):
            return None
        # This process may have been stopped itself, or its network for a moment; and one that was
        # killed answers by then that nobody listens.
        self._ended.wait(_PAUSE)
        second = self._asker.ask(self._seconds)
        for number, (health, start) in enumerate(zip(second, self._starts, strict=True)):
            if not self._is_well(health, start):
                return self._told(number, health)
        return None

    @staticmethod
    def _is_well(health: Health, start: int) -> bool:
        return not health.trouble and health.start == start

    def _told(self, task: int, health: Health) -> str:
        what = health.trouble or "was started again"
        since = time.monotonic() - self._since
        told = f"{self.name(task)} {what}, in {self.doing}, begun {since:.1f} s ago"
        waits = self._waits()
        if task in waits:
            told += f"; {'; '.join(waits.pop(task))}"
        return "\n".join([told, *_indented(waits)])

    def _broken_connection(self, error: BaseException | None) -> str:
        """What an error, or one that it was raised from, says of a connection; "" if nothing."""
        while error is not None:
            text, code = str(error), getattr(error, "error_code", None)
            # Between workers the code is gRPC's, and stands in the text alone.
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
    return [f"  {line}" for found in waits.values() for line in found]


_current: Watch | None = None


def current() -> Watch | None:
    """The one of this process; None if it drives no workers."""
    return _current


def make_current(watch: Watch | None) -> None:
    """Lets a watch be that of this process."""
    global _current
    _current = watch


def begin(doing: str, is_step: bool = False) -> None:
    """Notes what this process is about from now on.

    Args:
        doing: in words, such as "step 3".
        is_step: whether it is a step, which is not to last longer than others.
    """
    if _current is not None:
        _current.begin(doing, is_step)


def during(doing: str) -> contextlib.AbstractContextManager[None]:
    """Notes what this process is about while a context lasts; see `Watch.during`."""
    return contextlib.nullcontext() if _current is None else _current.during(doing)


def end_step() -> None:
    """Notes that a step was finished."""
    if _current is not None:
        _current.end_step()


def stop() -> None:
    """Ends the watch of this process, if it has one."""
    if _current is not None:
        _current.stop()
        make_current(None)


def check_workers(error: BaseException | None = None) -> None:
    """Asks the workers of this process, if it has some, whether all are there.

    Args:
        error: the reason to ask; see `Watch.check`.
    """
    if _current is not None:
        _current.check(error)
