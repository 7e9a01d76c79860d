"""The state of workers, from the status request of TensorFlow's servers."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from pipemesh.errors import DeviceError

# gRPC reads this at its first use. Without it gRPC writes a line for each server that ends.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

QUESTION = "/tensorflow.WorkerService/GetStatus"
# Connections are direct, without a proxy; messages are small.
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclasses.dataclass(frozen=True)
class Health:
    """The answer of a worker."""

    # Such as `CPU:0`; none without an answer.
    devices: tuple[str, ...] = ()
    # A number that differs each time the worker starts.
    start: int = 0
    # The reason for a missing answer.
    trouble: str = ""


_FOREIGN = Health(trouble="is no worker: a server of another kind answers there")
# Error texts of gRPC and Linux.
_BROKEN = ("reset by peer", "Broken pipe", "Socket closed", "Cancelling all calls")


class Asker:
    """A requester of the state of workers at some addresses, with its own connections."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [grpc.insecure_channel(a, options=_OPTIONS) for a in addresses]
        # The time of each worker's last answer.
        self._since = [time.monotonic()] * len(addresses)

    def ask(self, seconds: float) -> list[Health]:
        """Returns the state of each worker, after at most `seconds`."""
        calls = [
            channel.unary_unary(QUESTION).future(b"", timeout=seconds) for channel in self._channels
        ]
        healths: list[Health] = []
        for number, call in enumerate(calls):
            healths.append(_answer(call, self._since[number]))
            if not healths[-1].trouble:
                self._since[number] = time.monotonic()
        return healths

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            channel.close()


def ask(addresses: Sequence[str], seconds: float) -> list[Health]:
    """Returns the state of the workers at some addresses, each asked once."""
    asker = Asker(addresses)
    try:
        return asker.ask(seconds)
    finally:
        asker.close()


def check_distinct(healths: Mapping[str, Health]) -> None:
    """Raises DeviceError if two addresses lead to one worker."""
    known: dict[int, str] = {}
    for address, health in healths.items():
        if health.start and (other := known.setdefault(health.start, address)) != address:
            raise DeviceError(
                f"addresses {other!r} and {address!r} lead to one worker; give each worker once"
            )


def _answer(call: Any, since: float) -> Health:
    """Reads the answer of a worker whose last answer was at `since`."""
    try:
        return _read(call.result())
    except grpc.FutureCancelledError:
        return Health(trouble="is not asked any more")
    except grpc.RpcError as error:
        details = str(call.details() or error).rpartition("last error: ")[2]
        # A stopped worker accepts no connection, either: its system answers once, then nothing
        # follows.
        if call.code() == grpc.StatusCode.DEADLINE_EXCEEDED or "timed out" in details:
            waited = time.monotonic() - since
            return Health(trouble=f"has not answered for {waited:.0f} s")
        if call.code() == grpc.StatusCode.UNIMPLEMENTED:
            return _FOREIGN
        if "refused" in details:
            return Health(trouble="is not there (connection refused)")
        if any(sign in details for sign in _BROKEN):
            return Health(trouble="broke the connection off")
        return Health(trouble=f"is cut off ({details})")
    except (IndexError, KeyError, TypeError, ValueError):
        return _FOREIGN


def _read(message: bytes) -> Health:
    """Reads a `GetStatusResponse`, whose first field is the devices; malformed bytes raise
    IndexError, KeyError, TypeError or ValueError.
    """
    devices: list[str] = []
    start = 0
    for number, value in _fields(message):
        if number == 1:
            device = dict(_fields(value))
            devices.append(device[1].decode().rpartition("/device:")[2])
            start = start or int.from_bytes(device[6], "little")
    return Health(tuple(devices), start) if devices and start else _FOREIGN


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields numbers and values of a protocol buffer's fields; no installed module defines it."""
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
    """Returns the integer that starts at a byte, and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
