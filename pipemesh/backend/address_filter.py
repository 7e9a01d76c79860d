"""Restricts which addresses may connect to TensorFlow's server.

TensorFlow's servers listen on all addresses of a machine, and no option changes that. A filter on
their sockets drops packets from, or to, other addresses than the allowed ones before the server
answers. The filter is a Linux "classic" packet filter, which needs no privilege.

Linux accepts packets for any of its addresses from any network. A filter for an address of this
machine therefore also checks the network interface, so a host of another network that has found a
route to the address gets no answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence

from pipemesh.addresses import (
    LOOPBACK_INTERFACE,
    interfaces_by_address,
    is_loopback,
    plain_ip,
)
from pipemesh.errors import DeviceError

# From asm-generic/socket.h; Python has no name for it.
_SO_ATTACH_FILTER = 26
# Offsets from this one on count from the start of the IP header.
_NET = -0x100000
# The virtual offset of the number of the receiving interface.
_INTERFACE = -0x1000 + 8
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20
_RIGHT, _AND, _IF_EQUAL, _RETURN = 0x74, 0x54, 0x15, 0x06
_ALL, _NOTHING = 0xFFFFFFFF, 0
_LOOPBACK = ("127.0.0.0/8", "::1/128")


def keep_to(port: int, addresses: Sequence[str], peers: bool = False) -> None:
    """Drops connections to a port of this process from, or to, other addresses than these."""
    # With `peers`, the addresses are those of clients that may connect. Otherwise they are
    # addresses of this machine: others may connect through the network interface of such an
    # address, and so may this machine itself. A loopback address stands for all loopback addresses.
    allowed = networks(addresses)
    interfaces = () if peers else interfaces_of(addresses)
    code = program(allowed, peers, interfaces)
    buffer = ctypes.create_string_buffer(code)
    value = struct.pack("HL", len(code) // 8, ctypes.addressof(buffer))
    is_listening = False
    for sock in _sockets_of(port):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            is_listening = True
            try:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)
            except OSError as error:
                raise DeviceError(
                    f"this system cannot restrict port {port} to {', '.join(addresses)} "
                    f"({error.strerror})"
                ) from error
            # Drop pending connections; allowed clients connect again.
            while select.select([sock], [], [], 0)[0]:
                try:
                    sock.accept()[0].close()
                except BlockingIOError:
                    break
    if not is_listening:
        raise DeviceError(f"this process does not listen on port {port}")
    for sock in _sockets_of(port):
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with contextlib.suppress(OSError):
                address = sock.getpeername()[0] if peers else sock.getsockname()[0]
                # The interface of an earlier connection is unknown.
                is_known = peers or is_loopback(address) or not interfaces
                if not (is_known and is_allowed(address, allowed)):
                    sock.shutdown(socket.SHUT_RDWR)


def networks(
    addresses: Sequence[str],
) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Returns the network of each address; a loopback stands for all loopback addresses."""
    texts: list[str] = []
    for address in addresses:
        mapped = plain_ip(address)
        texts += _LOOPBACK if mapped.is_loopback else [str(mapped)]
    return [ipaddress.ip_network(text) for text in dict.fromkeys(texts)]


def is_allowed(
    address: str, allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> bool:
    """Returns whether an address, mapped into IPv6 or not, lies in one of the networks."""
    return any(plain_ip(address) in network for network in allowed)


def interfaces_of(addresses: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of the interfaces that receive packets for addresses of this machine."""
    # Empty, which allows any interface, if an address belongs to no network: it is on the loopback
    # interface, but no loopback address.
    by_address = interfaces_by_address()
    others = [str(address) for address in map(plain_ip, addresses) if not address.is_loopback]
    numbers = {by_address.get(address, LOOPBACK_INTERFACE) for address in others}
    return () if LOOPBACK_INTERFACE in numbers else tuple(sorted({LOOPBACK_INTERFACE, *numbers}))


def program(
    allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network],
    peers: bool,
    interfaces: Sequence[int] = (),
) -> bytes:
    """Returns the filter's code, which checks sources (`peers`) or destinations of packets."""
    four = [_match(n, _NET + (12 if peers else 16), interfaces) for n in allowed if n.version == 4]
    six = [_match(n, _NET + (8 if peers else 24), interfaces) for n in allowed if n.version == 6]
    refused = [(_RETURN, 0, 0, _NOTHING)]
    four_lines = [line for lines in four for line in lines] + refused
    six_lines = [line for lines in six for line in lines] + refused
    # A conditional jump is short, so a second, long one skips the lines for IPv4.
    begin = [
        (_LOAD_BYTE, 0, 0, _NET),
        (_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 1, 0, 4),
        (0x05, 0, 0, len(four_lines)),
    ]
    lines = [*begin, *four_lines, *six_lines]
    return b"".join(struct.pack("HBBI", code, yes, no, k & _ALL) for code, yes, no, k in lines)


def _match(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network, offset: int, interfaces: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Returns code that lets packets of one network through."""
    passes = [(_RETURN, 0, 0, _ALL)]
    if interfaces:
        last = len(interfaces) - 1
        passes = [
            (_LOAD_WORD, 0, 0, _INTERFACE),
            *((_IF_EQUAL, last - i + 1, 0, number) for i, number in enumerate(interfaces)),
            (_RETURN, 0, 0, _NOTHING),
            *passes,
        ]
    words = struct.unpack(f"!{network.max_prefixlen // 32}I", network.network_address.packed)
    masks = struct.unpack(f"!{network.max_prefixlen // 32}I", network.netmask.packed)
    lines: list[tuple[int, int, int, int]] = []
    for i, (word, mask) in enumerate(zip(words, masks, strict=True)):
        # The remaining lines of this network: three per word, and the last ones.
        left = 3 * (len(words) - 1 - i) + len(passes)
        lines += [
            (_LOAD_WORD, 0, 0, offset + 4 * i),
            (_AND, 0, 0, mask),
            (_IF_EQUAL, 0, left, word),
        ]
    return [*lines, *passes]


def _sockets_of(port: int) -> Iterator[socket.socket]:
    """Yields copies of this process's sockets on a port, including those that C++ code opened."""
    for number in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(number))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock, contextlib.suppress(OSError):
            name = sock.getsockname()
            if sock.family in (socket.AF_INET, socket.AF_INET6) and name[1] == port:
                yield sock
