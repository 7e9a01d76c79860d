"""Asks workers how they are: TensorFlow's own question of one server to another."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from pipemesh.errors import DeviceError

# It reads this when it is first used; otherwise it writes a line for each server that ends.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

QUESTION = "/tensorflow.WorkerService/GetStatus"
# A field of the answer that TensorFlow's own has not.
_WAITS = 15
# Nobody stands between workers; what is sent is small.
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclasses.dataclass(frozen=True)
class Health:
    """What a worker says of itself.

    Attributes:
        devices: what it offers, such as `CPU:0`; none if it does not answer.
        start: a number that differs each time it is started.
        trouble: why there is no answer; "" if there is one.
        waits: of a process that waits to take part, the text that stands for it in a roster; ""
            of all others.
        takes_part: whether that process takes part, and is about to start its server.
    """

    devices: tuple[str, ...] = ()
    start: int = 0
    trouble: str = ""
    waits: str = ""
    takes_part: bool = False


_FOREIGN = Health(trouble="is no worker: a server of another kind answers there")
# In the words of gRPC and of Linux.
_BROKEN = ("reset by peer", "Broken pipe", "Socket closed", "Cancelling all calls")


class Asker:
    """Asks workers again and again, by connections of its own.

    Args:
        addresses: `host:port` of each.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [grpc.insecure_channel(a, options=_OPTIONS) for a in addresses]
        # When each has answered last.
        self._since = [time.monotonic()] * len(addresses)

    def ask(self, seconds: float) -> list[Health]:
        """How each worker is.

        Args:
            seconds: to wait for an answer.
        """
        pending = [
            channel.unary_unary(QUESTION).future(b"", timeout=seconds) for channel in self._channels
        ]
        found: list[Health] = []
        for number, each in enumerate(pending):
            found.append(_answer(each, self._since[number]))
            if not found[-1].trouble:
                self._since[number] = time.monotonic()
        return found

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            channel.close()


def ask(addresses: Sequence[str], seconds: float) -> list[Health]:
    """How each worker is, asked once.

    Args:
        addresses: `host:port` of each.
        seconds: to wait for an answer.

    Example:
        >>> ask(["127.0.0.1:9"], 1)[0].devices
        ()
    """
    asker = Asker(addresses)
    try:
        return asker.ask(seconds)
    finally:
        asker.close()


def check_distinct(healths: Mapping[str, Health], who: str = "process") -> None:
    """Checks that no two addresses lead to one process.

    Args:
        healths: what was answered at each address.
        who: what one of them is called.

    Raises:
        DeviceError: two do.

    Example:
        >>> check_distinct({"a:1": Health(("CPU:0",), 7), "b:1": Health(("CPU:0",), 7)}, "worker")
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: addresses 'a:1' and 'b:1' lead to one worker; give each \
worker once
    """
    known: dict[int | str, str] = {}
    for address, health in healths.items():
        start = health.waits or health.start
        if start and (other := known.setdefault(start, address)) != address:
            raise DeviceError(
                f"addresses {other!r} and {address!r} lead to one {who}; give each {who} once"
            )


def answer_of_waiting(start: str, takes_part: bool) -> bytes:
    """What a process answers that waits for others; see `Health`.

    Example:
        >>> _read(answer_of_waiting("ab", False)).waits
        'ab'
    """
    content = f"{start} {int(takes_part)}".encode()
    return bytes([_WAITS << 3 | 2, len(content)]) + content


def _answer(pending: Any, since: float) -> Health:
    try:
        return _read(pending.result())
    except grpc.FutureCancelledError:
        return Health(trouble="is not asked any more")
    except grpc.RpcError as error:
        told = str(pending.details() or error).rpartition("last error: ")[2]
        # One that is stopped lets nobody in, either: its system answers, and then nothing comes.
        if pending.code() == grpc.StatusCode.DEADLINE_EXCEEDED or "timed out" in told:
            waited = time.monotonic() - since
            return Health(trouble=f"has not answered for {waited:.0f} s")
        if pending.code() == grpc.StatusCode.UNIMPLEMENTED:
            return _FOREIGN
        if "refused" in told:
            return Health(trouble="is not there (connection refused)")
        if any(sign in told for sign in _BROKEN):
            return Health(trouble="broke the connection off")
        return Health(trouble=f"is cut off ({told})")
    except (IndexError, KeyError, TypeError, ValueError):
        return _FOREIGN


def _read(message: bytes) -> Health:
    """The devices of a `GetStatusResponse`, whose first field they are.

    Raises:
        IndexError, KeyError, TypeError or ValueError: it is none.
    """
    devices: list[str] = []
    start = 0
    for number, value in _fields(message):
        if number == _WAITS:
            waits, _, takes_part = value.decode().partition(" ")
            told = "has not begun yet, or begins again"
            return Health(trouble=told, waits=waits, takes_part=takes_part == "1")
        if number == 1:
            of_device = dict(_fields(value))
            name = of_device[1].decode()
            devices.append(name.rpartition("/device:")[2])
            start = start or int.from_bytes(of_device[6], "little")
    return Health(tuple(devices), start) if devices and start else _FOREIGN


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protocol buffer with their numbers; the module of this one is not installed.

    Example:
        >>> list(_fields(bytes([0x0A, 1, 65, 0x10, 5])))
        [(1, b'A'), (2, b'\\x05')]
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            begin = at
            _, at = _varint(message, at)
            yield key >> 3, message[begin:at]
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, at = _varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
