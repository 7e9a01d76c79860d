"""This process as the client of workers: connected, watched, begun again when one is lost."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from pipemesh.hosts import silence, watch
from pipemesh.hosts.children import death_signal, set_death_signal
from pipemesh.hosts.cluster import Cluster
from pipemesh.hosts.gather import gather

# How often in a row a program was begun again without a step in between.
_AGAIN = "PIPEMESH_BEGUN_AGAIN"
_MOST_AGAIN = 5
_LOST = 3
# Seconds after which connecting with a worker is said to hang; after twice as many it is given up.
_CONNECTED = 60.0
# Seconds to wait for standard output to be written.
_FLUSHED = 5.0
# Of the thread that Python began with; whichever begins again passes it on.
_DEATH_SIGNAL = death_signal()


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
    """Makes the workers' devices those of this process, and watches them from now on.

    To be called before TensorFlow's first operation.

    Args:
        cluster: the workers.
        address: `host:port` of this process, as workers reach it; by default found.
        answer: seconds in which a worker has to say that it is there; it is asked twice.
        wait: seconds to wait for workers that are not there.
        again: whether this program is to be begun again when a worker is lost: it goes on by
            itself from what it has saved. Otherwise it ends.
        fewer: seconds after which those workers that are there are enough; None if all are
            needed.
        step_limit: seconds after which it is said of a step that does not end who waits for whom;
            after twice as many a worker is taken for lost. By default it depends on the steps
            before.

    Raises:
        DeviceError: a worker is not there, two addresses lead to one, a worker does not reach this
            process, or TensorFlow has started.
    """
    from pipemesh.backend.cluster import check_way_back, connect_workers

    places, healths = gather(cluster, wait, answer, say, fewer=fewer)
    if has_begun_again() and len(places) == len(cluster.workers):
        say("all workers are there")
    watched = watch.Watch(
        places,
        [health.start for health in healths],
        answer,
        begin_again if again else end,
        limit=step_limit,
        tell=say,
    )
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
        # TensorFlow's errors say little of a worker that is lost.
        watched.check(error)
        raise


def has_begun_again() -> bool:
    """Whether this program was begun again by itself."""
    return os.environ.get(_AGAIN) is not None


def note_stages(devices: Sequence[Sequence[str]]) -> None:
    """Notes which stages lie on which workers, to be said of one that is lost.

    Args:
        devices: those of each stage.
    """
    watched = watch.current()
    if watched is None:
        return
    from pipemesh.backend.cluster import task_of
    from pipemesh.backend.processes import current_processes

    processes = current_processes()
    owner = processes.owner if processes else task_of
    stages: dict[int, list[int]] = collections.defaultdict(list)
    for stage, home in enumerate(devices):
        for task in sorted({task for d in home if (task := owner(d)) is not None}):
            stages[task].append(stage)
    watched.stages = {
        task: f"stage{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        for task, found in stages.items()
    }


def begin_again(what: str) -> NoReturn:
    """Replaces this process by the same program: TensorFlow cannot forget a worker that is lost.

    Whatever it was about ends here, in the middle of it; it goes on from what it has saved.
    """
    try:
        watched = watch.current()
        steps = watched.steps if watched else 0
        times = 0 if steps else int(os.environ.get(_AGAIN, "0")) + 1
        if times > _MOST_AGAIN:
            end(f"{what}\n{times} times in a row no step was finished in between")
        first, *more = what.split("\n")
        say("\n".join([f"{first}; going on from the last checkpoint", *more]))
        _leave()
        os.environ[_AGAIN] = str(times)
        for name in os.listdir("/proc/self/fd"):
            if (number := int(name)) > 2:
                try:
                    flags = fcntl.fcntl(number, fcntl.F_GETFD)
                    fcntl.fcntl(number, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
                except OSError:
                    # The one of the listing.
                    continue
        set_death_signal(_DEATH_SIGNAL)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except Exception as error:
        end(f"{what}\nthis program could not be begun again ({error})")


def end(what: str) -> NoReturn:
    """Ends this process: what TensorFlow waits for does not come."""
    silence.say(f"error: {what}")
    _leave()
    os._exit(_LOST)


def say(text: str) -> None:
    """Writes a line on standard error."""
    silence.say(f"pipemesh: {text}")


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A temporary folder, removed at the end; also when this program begins again or is ended."""
    with tempfile.TemporaryDirectory() as path:
        _scratch.add(path)
        try:
            yield path
        finally:
            _scratch.remove(path)


_scratch: set[str] = set()


def _leave() -> None:
    """Does what Python does at the end of a program that matters after it, within seconds."""

    def work() -> None:
        for path in list(_scratch):
            shutil.rmtree(path, ignore_errors=True)
        for name, module in list(sys.modules.items()):
            # What AutoGraph wrote is removed at the end of Python, which does not come.
            if name.startswith("__autograph_generated_file"):
                with contextlib.suppress(OSError, TypeError):
                    os.unlink(str(module.__file__))
        # Nobody may read it, or it is being written to by a thread that will not return.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            sys.stdout.flush()

    thread = threading.Thread(target=work, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(_FLUSHED)
