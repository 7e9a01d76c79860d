"""Connections between processes, and the addresses that may connect."""

import contextlib
import socket
import struct
import subprocess
import sys

import pytest
import tensorflow as tf

from pipemesh.backend.cluster import (
    connect_workers,
    host_of,
    interfaces_of,
    is_allowed,
    keep_to,
    networks,
    program,
    task_of,
    worker_devices,
)
from pipemesh.errors import DeviceError
from tests.hosts.namespaces import network, why_not


def own_address():
    """An address of this machine that is no loopback; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent, contextlib.suppress(OSError):
        unsent.connect(("192.0.2.1", 9))
        return unsent.getsockname()[0]


@pytest.fixture
def server():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as found:
        yield found


def reaches(address, server):
    port = server.getsockname()[1]
    try:
        socket.create_connection((address, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def test_a_loopback_alone_is_reached(server):
    assert reaches("127.0.0.1", server)
    keep_to(server.getsockname()[1], ["127.0.0.1"])
    assert reaches("127.0.0.1", server)
    assert reaches("127.0.0.2", server)


def test_other_addresses_of_this_machine_are_not_reached(server):
    if (own := own_address()) is None:
        pytest.skip("this machine has a loopback alone")
    port = server.getsockname()[1]
    with socket.create_connection((own, port), timeout=5) as first:
        let_in, _ = server.accept()
        with let_in, socket.create_connection((own, port), timeout=5) as second:
            keep_to(port, ["127.0.0.1"])
            assert not reaches(own, server)
            for early in (first, second):
                early.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert early.recv(1) == b""
    assert reaches("127.0.0.1", server)


@pytest.mark.parametrize("peers", [False, True])
def test_other_addresses_are_dropped(server, peers):
    keep_to(server.getsockname()[1], ["192.0.2.7"], peers)
    assert not reaches("127.0.0.1", server)


def test_a_port_that_is_not_listened_on_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(DeviceError, match=f"does not listen on port {port}"):
        keep_to(port, ["127.0.0.1"])


SERVER = """
import socket, sys
from pipemesh.backend.cluster import keep_to
with socket.create_server(("::", 2222), family=socket.AF_INET6, dualstack_ipv6=True):
    keep_to(2222, [sys.argv[1]])
    print(flush=True)
    sys.stdin.read()
"""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 2222), timeout=1.5)"


def test_an_address_is_reached_through_its_own_network_alone():
    """Linux answers for any of its addresses on every network, as to one who routes to a tunnel."""
    if why := why_not():
        pytest.skip(f"this needs hosts of their own: {why}")
    with network(2) as there:
        there.link(1, 2, ["10.88.0.2", "10.88.0.3"])
        there.ip(0, f"route add 10.88.0.2 via {there.address(1)}")
        server = subprocess.Popen(
            there.warm(1, "-c", SERVER, "10.88.0.2"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with server:
            server.stdout.readline()
            tries = [(1, "10.88.0.2"), (2, "10.88.0.2"), (0, "10.88.0.2"), (0, there.address(1))]
            python = [sys.executable, "-I", "-S", "-c"]
            clients = [
                subprocess.Popen(there.on(host, *python, REACH, address), stderr=subprocess.DEVNULL)
                for host, address in tries
            ]
            assert [client.wait() for client in clients] == [0, 0, 1, 1]
            server.stdin.close()


def run(code, packet, interface=0):
    """Runs the filter as the kernel does; returns how much of a packet it passes."""
    lines = [struct.unpack("HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    at = value = 0
    while True:
        operation, yes, no, k = lines[at]
        at += 1
        offset = (k - (2**32 - 0x100000)) if k >= 2**31 else k
        if operation == 0x30:
            value = packet[offset]
        elif operation == 0x20:
            ancillary = k == 2**32 - 0x1000 + 8
            value = interface if ancillary else int.from_bytes(packet[offset : offset + 4], "big")
        elif operation == 0x74:
            value >>= k
        elif operation == 0x54:
            value &= k
        elif operation == 0x15:
            at += yes if value == k else no
        elif operation == 0x05:
            at += k
        elif operation == 0x06:
            return k


def packet(source, target):
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    ends = socket.inet_pton(family, source) + socket.inet_pton(family, target)
    return (bytes([0x60]) + bytes(7) if ":" in source else bytes([0x45]) + bytes(11)) + ends


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize(
    "address", ["127.3.2.1", "10.0.0.5", "10.0.0.6", "::1", "fd00::5", "fd00::6"]
)
def test_the_filter_passes_allowed_addresses_only(address, peers):
    allowed = networks(["10.0.0.5", "fd00::5", "127.0.0.1"])
    other = "fe80::1" if ":" in address else "9.9.9.9"
    ends = (address, other) if peers else (other, address)
    assert bool(run(program(allowed, peers), packet(*ends))) == is_allowed(address, allowed)
    assert is_allowed(address, allowed) == (address[-1] != "6")
    assert not run(program(allowed, peers), packet(*ends[::-1]))
    by_interface = program(allowed, peers, [1, 4])
    for interface, wanted in ((1, True), (3, False), (4, True)):
        let_through = bool(run(by_interface, packet(*ends), interface))
        assert let_through == (wanted and is_allowed(address, allowed))


def test_a_loopback_stands_for_all_loopback_addresses():
    allowed = networks(["10.0.0.5", "127.0.0.1"])
    assert list(map(str, allowed)) == ["10.0.0.5/32", "127.0.0.0/8", "::1/128"]
    assert interfaces_of(["127.0.0.1"]) == (1,)


def test_the_port_of_a_client_must_be_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        client = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DeviceError, match="in use; give this process another port"):
            connect_workers(["127.0.0.1:1"], client)


def test_connecting_after_tensorflow_has_started_is_an_error():
    tf.ones([])
    with pytest.raises(DeviceError, match="before the first operation"):
        connect_workers(["127.0.0.1:1"])


def test_a_process_that_is_alone_has_no_workers():
    assert worker_devices("CPU") == []
    assert task_of("/job:worker/replica:0/task:1/device:CPU:0") is None


def test_the_host_of_a_gpu_is_the_cpu_of_its_process():
    assert host_of("GPU:1") == "CPU:0"
