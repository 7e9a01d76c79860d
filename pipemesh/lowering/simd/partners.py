"""The processes whose cores meet in collectives: liveness checks and comparison of programs."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.errors import DeviceError

# A process is gone after this number of unanswered requests in a row.
_TRIES = 3
_ANSWER_SECONDS = 5.0
_EVERY_SECONDS = 5.0
# First key for groups of all cores and for the messages between them. All other keys count from 1
# and from 1 << 30. No group uses a key twice.
_KEYS = 1 << 29
_KEYS_OF_A_GROUP = 1 << 16
_groups: dict[tuple[int, tuple[str, ...]], tuple[int, Iterator[int]]] = {}


class Partners:
    """The processes that the TensorFlow server of this process knows, including this one.

    Attributes:
        addresses: the addresses of all processes, in order; empty if there is no server.
        process: the index of this process.
    """

    def __init__(self) -> None:
        server = collectives.server()
        self.addresses: list[str] = []
        self.process = 0
        self._names: list[str] = []
        if server is not None:
            (job,) = [job for job in server.cluster.job if job.name == server.job_name]
            self.addresses = [job.tasks[i] for i in sorted(job.tasks)]
            self.process = server.task_index
            self._names = [f"/job:{job.name}/replica:0/task:{i}" for i in sorted(job.tasks)]
        self._answered: set[int] = set()
        self._failures = [0] * len(self.addresses)
        self._next = time.monotonic() + _EVERY_SECONDS
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Returns whether there is no other process."""
        return len(self.addresses) < 2

    @property
    def others(self) -> list[int]:
        """Returns the indices of the other processes."""
        return [i for i in range(len(self.addresses)) if i != self.process]

    def describe(self, processes: Sequence[int]) -> str:
        """Returns the processes by index and address."""
        return ", ".join(f"process {i} ({self.addresses[i]})" for i in processes)

    def silent(self) -> list[int]:
        """Returns the other processes that do not answer now."""
        others = self.others
        if not others:
            return []
        with concurrent.futures.ThreadPoolExecutor(min(16, len(others))) as pool:
            answers = list(pool.map(self._answers, others))
        return [i for i, answers in zip(others, answers, strict=True) if not answers]

    def _answers(self, process: int) -> bool:
        return collectives.answers(self._names[process], _ANSWER_SECONDS)

    def all_have_come(self) -> None:
        """Records that all processes were present: one that stops answering is gone."""
        self._answered.update(range(len(self.addresses)))

    def gone(self) -> list[int]:
        """Returns processes that stopped answering some seconds ago; polls them at intervals."""
        if self.alone or time.monotonic() < self._next or not self._lock.acquire(blocking=False):
            return []
        try:
            silent = self.silent()
            for i in range(len(self.addresses)):
                self._failures[i] = self._failures[i] + 1 if i in silent else 0
                if i not in silent:
                    self._answered.add(i)
            self._next = time.monotonic() + _EVERY_SECONDS
            return [i for i in silent if i in self._answered and self._failures[i] >= _TRIES]
        finally:
            self._lock.release()


class Agreement:
    """A comparison between all cores of a mesh of the program that they are about to run."""

    def __init__(
        self,
        partners: Partners,
        num_cores: int,
        devices: Sequence[str],
        first_core: int,
        tokens: Sequence[tf.Variable],
    ) -> None:
        self._partners = partners
        self._num_cores = num_cores
        self._first_core = first_core
        self._tokens = tokens
        key = (num_cores, tuple(devices))
        new = (_KEYS + len(_groups), itertools.count(_KEYS + len(_groups) * _KEYS_OF_A_GROUP))
        self._group, self._instances = _groups.setdefault(key, new)

    def check(
        self, steps: Sequence[str], failed: str | None, on_all: Callable[..., list[np.ndarray]]
    ) -> None:
        """Raises a DeviceError unless all processes have the same program, and each its own cores.

        Args:
            steps: the steps of the program, one line each.
            failed: the reason if this process has no program.
            on_all: runs a function of a core's position on all cores of this process.
        """
        text = "\n".join(steps if failed is None else [failed])
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int32)
        encoded = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        head = [self._partners.process, failed is not None, len(encoded), *digest]
        rows = self._gather(on_all, lambda core: np.array([core, *head], np.int32))
        self._partners.all_have_come()
        self._check_cores(rows)
        if (rows[:, 2:] == rows[0, 2:]).all() and not rows[:, 2].any():
            return
        width = int(rows[:, 3].max())
        padded = np.pad(encoded, (0, width - len(encoded)))
        bodies = self._gather(on_all, lambda _: padded)
        texts: dict[int, str] = {}
        failures: dict[int, str] = {}
        for row, body in zip(rows, bodies, strict=True):
            whole = bytes(body[: row[3]].astype(np.uint8)).decode()
            (failures if row[2] else texts)[int(row[1])] = whole
        raise DeviceError(self._difference(texts, failures))

    def _gather(
        self, on_all: Callable[..., list[np.ndarray]], of_core: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        instance = next(self._instances)

        def gather(i: int) -> np.ndarray:
            row = tf.constant(of_core(self._first_core + i))[None]
            token = self._tokens[i].handle
            meeting = collectives.Meeting(self._num_cores, self._group, instance, token)
            return collectives.gather(row, meeting).numpy()

        return on_all(gather)[0]

    def _check_cores(self, rows: np.ndarray) -> None:
        cores = rows[:, 0].tolist()
        twice = sorted({core for core in cores if cores.count(core) > 1})
        if twice:
            owners = sorted(set(rows[np.isin(rows[:, 0], twice), 1].tolist()))
            raise DeviceError(
                f"cores {', '.join(map(str, twice))} are given by {self._partners.describe(owners)}"
                "; every core belongs to one process, so give each its own first_core"
            )

    def _difference(self, texts: dict[int, str], failures: dict[int, str]) -> str:
        if failures:
            told = "; ".join(
                f"{self._partners.describe([i])} could not build its program: {why}"
                for i, why in failures.items()
            )
            return f"{told}. All processes need the same program, so none runs it"
        first, *others = texts
        differing = [i for i in others if texts[i] != texts[first]]
        mine, theirs = texts[first].splitlines(), texts[differing[0]].splitlines()
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            min(len(mine), len(theirs)),
        )
        end = "nothing more"
        return (
            f"{self._partners.describe(differing)} built another program than "
            f"{self._partners.describe([first])}: line {at + 1} is "
            f"{theirs[at] if at < len(theirs) else end!r}, there "
            f"{mine[at] if at < len(mine) else end!r}. All processes build the same programs in "
            "the same order, with the same mesh, rules and sizes"
        )
