"""Restricts which addresses may connect to TensorFlow's server.

TensorFlow's servers listen on all addresses of a machine and cannot be told otherwise. A filter on
their sockets drops what comes to, or from, other addresses than those that are allowed, before
it is answered. The program is one of Linux's "classic" packet filters, which need no privilege.

Linux takes packets for any of its addresses from any network. So a filter for an address of this
machine looks at the network interface, too: a host of another network that has found a way to the
address is not answered.
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

# From asm-generic/socket.h, which Python does not name.
_SO_ATTACH_FILTER = 26
# Offsets from here on count from the beginning of the IP header.
_NET = -0x100000
# Where the number of the interface seems to lie that a packet has come by.
_INTERFACE = -0x1000 + 8
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20
_RIGHT, _AND, _IF_EQUAL, _RETURN = 0x74, 0x54, 0x15, 0x06
_ALL, _NOTHING = 0xFFFFFFFF, 0
_LOOPBACK = ("127.0.0.0/8", "::1/128")


def keep_to(port: int, addresses: Sequence[str], peers: bool = False) -> None:
    """Lets nobody else reach a port that this process listens on.

    Connections that others have made before are cut.

    Args:
        port: the port.
        addresses: IPv4 or IPv6; one of a loopback stands for all of them.
        peers: whether they are those of the ones who may come; else one of this machine, by
            which others may reach it through its own network interface, and this machine itself.

    Raises:
        DeviceError: this process does not listen there, or the system filters nothing.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     keep_to(server.getsockname()[1], ["127.0.0.1"])
        ...     socket.create_connection(server.getsockname(), timeout=5).close()
    """
    allowed = networks(addresses)
    interfaces = () if peers else interfaces_of(addresses)
    code = program(allowed, peers, interfaces)
    buffer = ctypes.create_string_buffer(code)
    value = struct.pack("HL", len(code) // 8, ctypes.addressof(buffer))
    found = False
    for each in _sockets_of(port):
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found = True
            try:
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)
            except OSError as error:
                raise DeviceError(
                    f"this system cannot keep port {port} to {', '.join(addresses)} "
                    f"({error.strerror})"
                ) from error
            # Who has come before, and was not let in yet, may come again.
            while select.select([each], [], [], 0)[0]:
                try:
                    each.accept()[0].close()
                except BlockingIOError:
                    break
    if not found:
        raise DeviceError(f"this process does not listen on port {port}")
    for each in _sockets_of(port):
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with contextlib.suppress(OSError):
                one = each.getpeername()[0] if peers else each.getsockname()[0]
                # Nobody knows by which interface an early one has come.
                is_known = peers or is_loopback(one) or not interfaces
                if not (is_known and is_allowed(one, allowed)):
                    each.shutdown(socket.SHUT_RDWR)


def networks(
    addresses: Sequence[str],
) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """What addresses stand for: a loopback for all, any other for itself.

    Example:
        >>> [str(network) for network in networks(["10.0.0.5", "127.0.0.1"])]
        ['10.0.0.5/32', '127.0.0.0/8', '::1/128']
    """
    found: list[str] = []
    for address in addresses:
        mapped = plain_ip(address)
        found += _LOOPBACK if mapped.is_loopback else [str(mapped)]
    return [ipaddress.ip_network(each) for each in dict.fromkeys(found)]


def is_allowed(
    address: str, allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> bool:
    """Whether an address, mapped into IPv6 or not, lies in one of the networks."""
    return any(plain_ip(address) in network for network in allowed)


def interfaces_of(addresses: Sequence[str]) -> tuple[int, ...]:
    """The network interfaces by which packets for addresses of this machine come.

    Returns:
        Their numbers; none if packets may come by any, as for an address that belongs to no
        network: one of the loopback interface that is no loopback address.

    Example:
        >>> interfaces_of(["127.0.0.1"])
        (1,)
    """
    by_address = interfaces_by_address()
    others = [str(address) for address in map(plain_ip, addresses) if not address.is_loopback]
    found = {by_address.get(address, LOOPBACK_INTERFACE) for address in others}
    return () if LOOPBACK_INTERFACE in found else tuple(sorted({LOOPBACK_INTERFACE, *found}))


def program(
    allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network],
    peers: bool,
    interfaces: Sequence[int] = (),
) -> bytes:
    """The filter, as the kernel takes it.

    Args:
        allowed: the networks.
        peers: whether a packet's source has to lie in them; else its destination.
        interfaces: by which a packet has to come; by any if there are none.
    """
    four = [_match(n, _NET + (12 if peers else 16), interfaces) for n in allowed if n.version == 4]
    six = [_match(n, _NET + (8 if peers else 24), interfaces) for n in allowed if n.version == 6]
    refused = [(_RETURN, 0, 0, _NOTHING)]
    of_four = [line for lines in four for line in lines] + refused
    of_six = [line for lines in six for line in lines] + refused
    # Behind the jump: another one over what is for IPv4, as far as need be.
    begin = [
        (_LOAD_BYTE, 0, 0, _NET),
        (_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 1, 0, 4),
        (0x05, 0, 0, len(of_four)),
    ]
    lines = [*begin, *of_four, *of_six]
    return b"".join(struct.pack("HBBI", code, yes, no, k & _ALL) for code, yes, no, k in lines)


def _match(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network, offset: int, interfaces: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Lines that let a packet through whose address lies in a network."""
    passes = [(_RETURN, 0, 0, _ALL)]
    if interfaces:
        last = len(interfaces) - 1
        passes = [
            (_LOAD_WORD, 0, 0, _INTERFACE),
            *((_IF_EQUAL, last - i + 1, 0, each) for i, each in enumerate(interfaces)),
            (_RETURN, 0, 0, _NOTHING),
            *passes,
        ]
    words = struct.unpack(f"!{network.max_prefixlen // 32}I", network.network_address.packed)
    masks = struct.unpack(f"!{network.max_prefixlen // 32}I", network.netmask.packed)
    lines: list[tuple[int, int, int, int]] = []
    for i, (word, mask) in enumerate(zip(words, masks, strict=True)):
        # What is left of the lines of this network: three a word, and the last ones.
        left = 3 * (len(words) - 1 - i) + len(passes)
        lines += [
            (_LOAD_WORD, 0, 0, offset + 4 * i),
            (_AND, 0, 0, mask),
            (_IF_EQUAL, 0, left, word),
        ]
    return [*lines, *passes]


def _sockets_of(port: int) -> Iterator[socket.socket]:
    """Sockets of this process whose own port it is, whoever opened them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            each = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with each, contextlib.suppress(OSError):
            own = each.getsockname()
            if each.family in (socket.AF_INET, socket.AF_INET6) and own[1] == port:
                yield each
