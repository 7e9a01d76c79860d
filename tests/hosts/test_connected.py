"""Connecting with workers that are hard to reach, or that are no workers."""

import contextlib
import struct
import subprocess
import threading

import pytest

from pipemesh.hosts.health import QUESTION
from tests.hosts.namespaces import network, why_not
from tests.hosts.workers import address_of, serving, start
from tests.warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# A proxy at which nobody listens.
PROXY = "http://127.0.0.1:9"
MODULE = "tests.hosts.connected"


@pytest.fixture(scope="module")
def hosts():
    """Three hosts, of which the last two have a worker each. All know a proxy for the web."""
    if why := why_not():
        pytest.skip(f"this needs hosts of their own: {why}")
    with (
        pytest.MonkeyPatch.context() as environment,
        network(2) as there,
        contextlib.ExitStack() as stack,
    ):
        environment.setenv("http_proxy", PROXY)
        environment.setenv("grpc_proxy", PROXY)
        listen = [there.address(1), "0.0.0.0"]
        workers = [
            start(f"--listen={address}", command=there.warm(host, "-m", "pipemesh", "worker"))
            for host, address in enumerate(listen, 1)
        ]
        for worker in workers:
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
        ports = [address_of(worker).rpartition(":")[2] for worker in workers]
        yield there, [f"{there.address(host)}:{port}" for host, port in enumerate(ports, 1)]


def connected(there, *words):
    done = subprocess.run(
        there.warm(0, "-m", MODULE, *words),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_proxy_for_the_web_is_not_asked_for_workers(hosts):
    """TensorFlow asked it, and waited without end or a word."""
    there, addresses = hosts
    assert connected(there, ",".join(addresses))[:2] == (0, "9.0\n")


def test_two_addresses_of_one_worker_are_refused_at_once(hosts):
    """Later clients of such a worker would hang, until it is started again."""
    there, addresses = hosts
    there.ip(2, "addr add 10.77.0.12/24 dev eth")
    other = addresses[1].replace(there.address(2), "10.77.0.12")
    code, _, told = connected(there, ",".join([*addresses, other]))
    assert (code, told.count("\n")) == (2, 1)
    assert f"addresses '{addresses[1]}' and '{other}' lead to one worker; give each" in told
    assert connected(there, ",".join(addresses))[:2] == (0, "9.0\n")


def test_a_worker_that_comes_from_another_address_is_named(hosts):
    there, addresses = hosts
    there.ip(1, "addr add 10.77.0.13/24 dev eth")
    there.ip(1, f"route add {there.address(0)} dev eth src 10.77.0.13")
    try:
        code, _, told = connected(there, ",".join(addresses))
    finally:
        there.ip(1, f"route del {there.address(0)} dev eth")
    assert (code, told.count("\n")) == (2, 1)
    assert f"worker 0 ({addresses[0]}) does not reach this process at {there.address(0)}:" in told
    assert f"which lets in {there.address(1)}, {there.address(2)} and this machine" in told


def test_connecting_has_a_limit_and_names_the_worker():
    """The server says that it is well, as one of TensorFlow, and answers nothing else."""
    name = b"/job:worker/replica:0/task:0/device:CPU:0"
    device = bytes([10, len(name)]) + name + bytes([0x31]) + struct.pack("<Q", 7)
    ended = threading.Event()

    def answer(method):
        if method == QUESTION:
            return lambda: bytes([10, len(device)]) + device
        return lambda: b"" * ended.wait(60)

    with serving(answer) as address:
        command = warm("-m", MODULE, address, "1")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        ended.set()
    assert done.returncode == 3, done.stderr[-3000:]
    told = f"connecting with worker 0 ({address})"
    assert f"pipemesh: {told} has lasted for 1 s\n" in done.stderr
    assert f"error: {told} does not end: it has lasted for 2 s\n" in done.stderr
