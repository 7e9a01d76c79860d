"""The client of workers, in this process: waits for them, connects, and restarts after a loss."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from pipemesh.errors import DeviceError
from pipemesh.hosts import processes, watch
from pipemesh.hosts.cluster import Cluster
from pipemesh.hosts.health import Asker, Health, check_distinct

# Environment variable with the number of restarts in a row without a finished step.
_RESTARTS = "PIPEMESH_BEGUN_AGAIN"
_MOST_RESTARTS = 5
_LOST = 3
# Seconds between two requests to missing workers.
_PAUSE = 0.3
# Seconds after which a slow connection is reported; after twice as many the worker counts as lost.
_CONNECTED = 60.0
# Seconds to wait for standard output to be written.
_FLUSHED = 5.0
# The signal of the main thread; the thread that restarts the program takes it over.
_DEATH_SIGNAL = processes.death_signal()


def connect(
    cluster: Cluster,
    *,
    address: str | None = None,
    answer: float = 5.0,
    wait: float = 600.0,
    again: bool = False,
    fewer: float | None = None,
    step_limit: float | None = None,
) -> None:
    """Makes the workers' devices available to this process, and starts to watch the workers.

    Call it before TensorFlow's first operation.

    Args:
        cluster: the workers.
        address: `host:port` of this process for the workers. Default: its address towards the first
            worker, with a free port.
        answer: seconds in which a worker must answer; it is asked twice.
        wait: seconds to wait for missing workers.
        again: if True, this program restarts after a loss and resumes from its last checkpoint;
            otherwise it ends.
        fewer: seconds after which the available workers are enough; None if all are needed.
        step_limit: seconds after which a step is reported as blocked, with the worker that blocks
            it; after twice as many a worker counts as lost. Default: a multiple of the last steps.

    Raises:
        DeviceError: a worker is missing, two addresses lead to one worker, a worker does not reach
            this process, or TensorFlow has started.

    Example:
        >>> connect(Cluster(("127.0.0.1:9",)), wait=0.0)
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: worker 0 (127.0.0.1:9) is not there (connection refused), \
after 0 s of waiting; start it there with `pipemesh worker`, or give other addresses
    """
    from pipemesh.backend.cluster import check_way_back, connect_workers

    places, healths = gather(cluster, wait, answer, say, fewer)
    if has_begun_again() and len(places) == len(cluster.workers):
        say("all workers are there")
    starts, lost = [health.start for health in healths], begin_again if again else end
    watched = watch.Watch(places, starts, answer, lost, limit=step_limit, tell=say)
    watched.start()
    watch.make_current(watched)
    try:
        names = [watched.name(task) for task in range(len(places))]
        with watched.during(f"connecting with {', '.join(names)}", _CONNECTED):
            connect_workers(list(places.values()), address)
        for task, name in enumerate(names):
            with watched.during(f"connecting with {name}", _CONNECTED):
                check_way_back(task)
    except Exception as error:
        # The watch describes a lost worker better than TensorFlow's error.
        watched.check(error)
        raise


def gather(
    cluster: Cluster,
    seconds: float,
    answer: float,
    tell: Callable[[str], object],
    fewer: float | None = None,
) -> tuple[dict[int, str], list[Health]]:
    """Waits for workers, and returns each one's address and answer by its number; spares replace
    those that do not answer, and after `fewer` seconds the available ones are enough.
    """
    addresses = [*cluster.workers, *cluster.spares]
    asker, begun, is_told = Asker(addresses), time.monotonic(), False
    try:
        while True:
            healths = dict(zip(addresses, asker.ask(answer), strict=True))
            check_distinct(healths)
            waited = time.monotonic() - begun
            spares = [a for a in cluster.spares if not healths[a].trouble]
            places = dict(enumerate(cluster.workers))
            missing: list[int] = []
            for number, address in enumerate(cluster.workers):
                if healths[address].trouble and spares and waited >= answer:
                    places[number] = spares.pop(0)
                elif healths[address].trouble:
                    missing.append(number)
            if missing and fewer is not None and waited >= fewer and len(missing) < len(places):
                for number in missing:
                    address = places.pop(number)
                    trouble = healths[address].trouble
                    tell(f"going on without worker {number} ({address}), which {trouble}")
                missing = []
            if not missing:
                for number, address in places.items():
                    if address != (lost := cluster.workers[number]):
                        tell(f"spare {address} takes the place of worker {number} ({lost})")
                return places, [healths[address] for address in places.values()]
            first = missing[0]
            trouble = f"worker {first} ({places[first]}) {healths[places[first]].trouble}"
            if waited >= seconds:
                raise DeviceError(
                    f"{trouble}, after {waited:.0f} s of waiting; start it there with `pipemesh "
                    "worker`, or give other addresses"
                )
            if not is_told:
                tell(f"waiting for {len(missing)} of {len(addresses)} workers: {trouble}")
                is_told = True
            time.sleep(_PAUSE)
    finally:
        asker.close()


def has_begun_again() -> bool:
    """Returns whether this program has restarted itself."""
    return os.environ.get(_RESTARTS) is not None


def note_stages(devices: Sequence[Sequence[str]]) -> None:
    """Stores the stages of each worker, for messages."""
    watched = watch.current()
    if watched is None:
        return
    from pipemesh.backend.cluster import task_of

    stages: dict[int, list[int]] = collections.defaultdict(list)
    for stage, home in enumerate(devices):
        for task in sorted({task for d in home if (task := task_of(d)) is not None}):
            stages[task].append(stage)
    watched.stages = {
        task: f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        for task, numbers in stages.items()
    }


def begin_again(reason: str) -> NoReturn:
    """Replaces this process by the same program, because TensorFlow cannot forget a lost worker; it
    resumes from its last checkpoint.
    """
    try:
        watched = watch.current()
        steps = watched.steps if watched else 0
        times = 0 if steps else int(os.environ.get(_RESTARTS, "0")) + 1
        if times > _MOST_RESTARTS:
            end(f"{reason}\n{times} times in a row no step was finished in between")
        first, *more = reason.split("\n")
        say("\n".join([f"{first}; going on from the last checkpoint", *more]))
        _leave()
        os.environ[_RESTARTS] = str(times)
        for name in os.listdir("/proc/self/fd"):
            if (number := int(name)) > 2:
                try:
                    flags = fcntl.fcntl(number, fcntl.F_GETFD)
                    fcntl.fcntl(number, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
                except OSError:
                    # This descriptor belonged to the listing.
                    continue
        processes.set_death_signal(_DEATH_SIGNAL)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except Exception as error:
        end(f"{reason}\nthis program could not be restarted ({error})")


def end(reason: str) -> NoReturn:
    """Ends this process, which may be blocked inside TensorFlow."""
    processes.say(f"error: {reason}")
    _leave()
    os._exit(_LOST)


def say(text: str) -> None:
    """Writes a line on standard error."""
    processes.say(f"pipemesh: {text}")


def _leave() -> None:
    """Does the necessary part of Python's own shutdown, within seconds."""

    def work() -> None:
        for name, module in list(sys.modules.items()):
            # Python would remove AutoGraph's files at its normal end.
            if name.startswith("__autograph_generated_file"):
                with contextlib.suppress(OSError, TypeError):
                    os.unlink(str(module.__file__))
        # The pipe may have no reader, or a blocked thread may be writing to it.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stdout.flush()

    thread = threading.Thread(target=work, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(_FLUSHED)
