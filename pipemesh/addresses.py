"""Addresses of processes and of this machine, without TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from pipemesh.errors import DeviceError

# A host name or an address; an IPv6 address is in brackets, because it contains colons.
_ADDRESS = re.compile(r"(?:\[([^\[\]\s]+)\]|([^\[\]:\s]+)):([0-9]{1,9})", re.ASCII)
# The interface for packets that a machine sends to itself.
LOOPBACK_INTERFACE = 1


def host_and_port(address: Any) -> tuple[str, int]:
    """Splits `host:port`, and removes brackets from the host; raises DeviceError if it is
    malformed.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is not None and 0 < int(match[3]) < 2**16:
        return match[1] or match[2], int(match[3])
    example = "'a:2222'"
    if isinstance(address, str) and address.count(":") > 1 and "[" not in address:
        example = "'[::1]:2222', as an IPv6 address needs brackets"
    raise DeviceError(f"address {address!r} is not host:port; write for example {example}")


def check_addresses(addresses: Sequence[Any]) -> None:
    """Raises DeviceError if an address is not `host:port`, or occurs twice."""
    known: set[tuple[str, int]] = set()
    for address in addresses:
        host, port = host_and_port(address)
        try:
            host = str(plain_ip(host))
        except ValueError:
            host = host.lower()
        if (host, port) in known:
            raise DeviceError(f"address {address!r} occurs twice; each process has its own")
        known.add((host, port))


def ips_of(addresses: Sequence[str]) -> list[str]:
    """Returns the IP addresses of the hosts in `host:port` texts, each once.

    A name may have several addresses. An unknown host raises DeviceError.
    """
    found = [str(info[4][0]) for address in addresses for info in _resolved(address)]
    return list(dict.fromkeys(found))


def own_address(peer: str) -> str:
    """Returns `host:port` of this process as `peer` reaches it, with a port that is free now.

    It raises DeviceError if there is no route to `peer`.
    """
    family, _, _, _, address = _resolved(peer)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:
        try:
            # Connecting a UDP socket sends nothing: the system only looks up the route.
            unsent.connect(address)
        except OSError as error:
            raise DeviceError(f"there is no way to {peer!r} ({error.strerror})") from error
        host = unsent.getsockname()[0]
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(ip: str) -> bool:
    """Returns whether an IP address is reachable only from this machine.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.5")
        (True, False)
    """
    return plain_ip(ip).is_loopback


def plain_ip(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an IP address without its scope, as IPv4 if it is an IPv4-mapped IPv6 address."""
    found = ipaddress.ip_address(ip.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def use_no_proxy() -> None:
    """Makes gRPC ignore `http_proxy` in this process and its children.

    A web proxy does not know the addresses of workers. Other protocols still use it.
    """
    # gRPC reads this variable first; an empty text means no proxy.
    os.environ["grpc_proxy"] = ""


def check_free(port: int, what: str, remedy: str) -> None:
    """Raises DeviceError if another process uses a port, because gRPC would share it.

    The port is above 0; `what` needs it, and `remedy` is advice for the error.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("", port))
        except OSError as error:
            raise DeviceError(f"{what}: {error.strerror}; {remedy}") from error


def own_ip(host: str, what: str) -> str:
    """Returns the IP address of this machine for a host name or an address as text.

    `what` is the source of the text, for the error. It raises DeviceError if the text is not an
    address, or the address of another machine.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeviceError(f"{what} is no address ({reason}); give one of this machine") from error
    addresses = [str(info[4][0]) for info in infos]
    interfaces = interfaces_by_address()
    for address in addresses:
        if is_loopback(address) or str(plain_ip(address)) in interfaces:
            return address
    known = ", ".join(interfaces) or "none but its loopback"
    raise DeviceError(
        f"{what}: this machine does not have the address {addresses[0]}; give one that it has: "
        f"{known}"
    )


def interfaces_by_address() -> dict[str, int]:
    """Returns the addresses of this machine, with the number of each network interface.

    Loopback addresses are omitted, because every machine has them.
    """
    found: dict[str, int] = {}
    for address, name in _interfaces():
        if not is_loopback(address):
            # The interface may have been removed.
            with contextlib.suppress(OSError):
                # A second address may have a label, such as `eth0:1`.
                found[address] = socket.if_nametoindex(name.partition(":")[0])
    return found


# The first fields of C's `struct ifaddrs`: the next element, name, flags and address.
_ELEMENT = struct.Struct("PPIP")
# By family, the offset and number of address bytes in C's address structure.
_BYTES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yields each address of this machine, with the name of its interface."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        element = first.value
        while element:
            content = ctypes.string_at(element, _ELEMENT.size)
            element, name, _, address = _ELEMENT.unpack(content)
            family = ctypes.c_ushort.from_address(address).value if address else None
            for known, (offset, size) in _BYTES.items():
                if family == known:
                    ip = socket.inet_ntop(known, ctypes.string_at(address + offset, size))
                    yield ip, ctypes.string_at(name).decode()
    finally:
        libc.freeifaddrs(first)


def _resolved(address: str) -> Sequence[tuple[Any, ...]]:
    host, port = host_and_port(address)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeviceError(f"the host of {address!r} is unknown ({reason})") from error
