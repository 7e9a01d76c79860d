"""Who takes part in a training of several processes: said once for all, in its log directory.

Each beginning has a roster of its own, with a number one above that before. A file gets its name by
`link`, which fails if there is one by this name: so of several processes that want to say who takes
part, one does, and the others read what it has said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
from typing import Any

from pipemesh.errors import DeviceError
from pipemesh.hosts.cluster import Cluster

_NAME = re.compile(r"processes-(\d+)\.json", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Member:
    """A process that takes part.

    Attributes:
        index: its number among all that were named, spares behind the others.
        start: a text that differs each time it is started, or begins again.
        place: the number of the one whose part it takes; its own but for a spare.
    """

    index: int
    start: str
    place: int


@dataclasses.dataclass(frozen=True)
class Roster:
    """Who takes part.

    Attributes:
        number: of the beginning.
        cluster: all that were named.
        members: who takes part, by their numbers from now on: the first one speaks for all.
        plan: the text of the plan, where it is not the one that was asked for; "" if it is.
        ended: whether the training has ended, as it was to.
    """

    number: int
    cluster: Cluster
    members: tuple[Member, ...] = ()
    plan: str = ""
    ended: bool = False

    def place_of(self, start: str) -> int | None:
        """The number that a process has from now on; None if it does not take part.

        Args:
            start: see `Member`.
        """
        found = [number for number, each in enumerate(self.members) if each.start == start]
        return found[0] if found else None

    def addresses(self) -> Cluster:
        """Those that take part, in the order of their numbers."""
        every = [*self.cluster.workers, *self.cluster.spares]
        return Cluster(tuple(every[each.index] for each in self.members))

    def name(self, index: int) -> str:
        """What a process is called by the number that it was given on its command line."""
        workers, spares = self.cluster.workers, self.cluster.spares
        if index < len(workers):
            return f"process {index} ({workers[index]})"
        return f"spare {spares[index - len(workers)]}"

    def told(self) -> list[str]:
        """What is otherwise than it was asked for, a line each."""
        lines: list[str] = []
        places = {each.place for each in self.members}
        for each in self.members:
            if each.index != each.place:
                lines.append(f"{self.name(each.index)} takes the place of {self.name(each.place)}")
        missing = [i for i in range(len(self.cluster.workers)) if i not in places]
        if missing:
            names = " and ".join(map(self.name, missing))
            lines.append(f"going on without {names}")
        first = self.members[0]
        if first.index:
            lines.append(f"{self.name(first.index)} has the log directory from now on")
        return lines


class Rosters:
    """Those of a log directory.

    Args:
        folder: the log directory, which all processes share; it is made if need be.

    Raises:
        DeviceError: it cannot be made.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise DeviceError(
                f"logdir={folder!r} cannot be made ({error.strerror}); processes say there who "
                "takes part, so give a folder that all of them share"
            ) from error

    def newest(self) -> Roster | None:
        """The one with the highest number; None if there is none.

        Raises:
            DeviceError: it is malformed.
        """
        while numbers := self._numbers():
            path = self._path(numbers[-1])
            try:
                with open(path, "rb") as file:
                    content = file.read()
            except FileNotFoundError:
                # Others have taken it away since: there is a newer one.
                continue
            return _parsed(content, path, numbers[-1])
        return None

    def say(self, roster: Roster) -> bool:
        """Says who takes part, unless somebody has said so before.

        Args:
            roster: its number is one above that of the newest.

        Returns:
            Whether it counts.

        Raises:
            DeviceError: it cannot be written, or another training holds the folder.
        """
        path = self._path(roster.number)
        temporary = os.path.join(self.folder, f".processes.{secrets.token_hex(8)}")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(roster), file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary)
        except OSError as error:
            raise DeviceError(f"{path} cannot be written ({error.strerror})") from error
        numbers = self._numbers()
        for number in numbers:
            # The one before is still read by those that come now.
            if number < numbers[-1] - 1:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(number))
        # Who was stopped in between may have given a name that was taken away before.
        return numbers[-1] == roster.number

    def check_free(self) -> None:
        """Checks that no training holds the folder, before the first roster of other addresses.

        Raises:
            DeviceError: one does.
        """
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceError(
                f"logdir={self.folder!r} is in use: another training writes to it; wait for it, "
                "stop it, or give another folder"
            ) from None
        except OSError:
            # Some network file systems know no locks; who holds the folder says so.
            return
        finally:
            os.close(fd)

    def _numbers(self) -> list[int]:
        found = map(_NAME.fullmatch, os.listdir(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, f"processes-{number}.json")


def _parsed(content: bytes, path: str, number: int) -> Roster:
    """Reads a roster, whose number is that of its file."""
    try:
        found: Any = json.loads(content)
        cluster = Cluster(tuple(found["cluster"]["workers"]), tuple(found["cluster"]["spares"]))
        members = tuple(Member(**each) for each in found["members"])
        roster = Roster(found["number"], cluster, members, found["plan"], found["ended"])
        count, places = len(cluster.workers) + len(cluster.spares), range(len(cluster.workers))
        well_formed = (
            roster.number == number
            and isinstance(roster.plan, str)
            and isinstance(roster.ended, bool)
            and all(isinstance(each.start, str) and each.place in places for each in members)
            and all(each.index in range(count) for each in members)
        )
        if not well_formed:
            raise ValueError("a value is of another kind, or out of range")
        return roster
    except (DeviceError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DeviceError(
            f"{path} does not say which processes take part ({type(error).__name__}: {error}); "
            "remove it"
        ) from error
