"""Offers the devices of this machine to a client: a server of TensorFlow, and nothing besides.

    pipemesh worker --port=2222 --cpu_devices=2
    pipemesh train --cluster=127.0.0.1:2222 --mesh_shape=layers:2 --model=...

A worker executes whatever a client sends: TensorFlow's protocol has no authentication and no
encryption. By default only this machine can reach the worker. --listen gives an address of a
private network, or of a tunnel, at which other machines can.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from pipemesh.addresses import (
    check_free,
    interfaces_by_address,
    is_loopback,
    own_ip,
    use_no_proxy,
)
from pipemesh.errors import DeviceError
from pipemesh.hosts import process
from pipemesh.hosts.cluster import EVERYWHERE, LOOPBACK, PORT

# Time limit for the worker to answer its own question.
_SECONDS_TO_START, _PAUSE = 30.0, 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to `parser`."""
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"where to listen; 0 for a free one ({PORT})"
    )
    parser.add_argument(
        "--listen",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="the address of this machine by which others may reach the worker, 0.0.0.0 for all; "
        "there is no authentication, so give one of a private network (127.0.0.1)",
    )
    parser.add_argument(
        "--cpu_devices",
        type=int,
        default=1,
        metavar="N",
        help="number of devices that the CPU is offered as (1)",
    )
    # A socket of the parent, which ends its workers with itself.
    parser.add_argument("--parent_fd", type=int, default=None, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        arguments: what was parsed.

    Returns:
        The exit code; a worker that listens ends by a signal, or with its parent.

    Raises:
        DeviceError: it cannot listen there.
    """
    if not 0 <= arguments.port < 2**16:
        raise DeviceError(f"--port={arguments.port}: it must be 0 or more, and below 65536")
    if arguments.cpu_devices < 1:
        raise DeviceError(f"--cpu_devices={arguments.cpu_devices}: it must be at least 1")
    process.hold_standard_files()
    ip = None
    if arguments.listen not in EVERYWHERE:
        ip = own_ip(arguments.listen, f"--listen={arguments.listen}")
    _check_free(arguments.port)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    server, port = _serve(arguments.port, ip, arguments.cpu_devices)
    address = f"{_reached(arguments.listen)}:{port}"
    _announce(address, ip)
    parent = None
    if arguments.parent_fd is not None:
        parent = socket.socket(fileno=arguments.parent_fd)
        parent.sendall(f"{address}\n".encode())
    # Returns when the parent has ended; signals end the process.
    select.select([parent] if parent else [], [], [])
    del server
    return 0


def _check_free(port: int) -> None:
    if port:
        check_free(port, f"--port={port}", "give another")


def _serve(port: int, ip: str | None, cpu_devices: int) -> tuple[Any, int]:
    """Starts a server, and returns it with its port; the address None lets everybody reach it."""
    use_no_proxy()
    import tensorflow as tf

    from pipemesh.backend.address_filter import keep_to

    cores = os.cpu_count() or 1
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": cpu_devices},
        inter_op_parallelism_threads=max(cpu_devices, cores),
        intra_op_parallelism_threads=max(1, cores // cpu_devices),
    )
    # Loading TensorFlow takes seconds.
    _check_free(port)
    try:
        server = tf.distribute.Server(
            {"worker": [f"localhost:{port}"]},
            job_name="worker",
            task_index=0,
            config=config,
            start=False,
        )
    except tf.errors.OpError as error:
        raise DeviceError(f"--port={port}: {error.message}") from error
    port = int(server.target.rpartition(":")[2])
    if ip is not None:
        try:
            keep_to(port, [ip])
        except DeviceError as error:
            raise DeviceError(
                f"--listen={ip}: {error}; --listen=0.0.0.0 lets everybody reach it"
            ) from error
    server.start()
    return server, port


def _announce(address: str, ip: str | None) -> None:
    """Reports on standard error that the worker answers, who can reach it, and its devices.

    Raises:
        DeviceError: it does not answer.
    """
    from pipemesh.hosts.health import ask

    own_address = address if ip else f"{LOOPBACK}:{address.rpartition(':')[2]}"
    limit = time.monotonic() + _SECONDS_TO_START
    (health,) = ask([own_address], _SECONDS_TO_START)
    while health.trouble and time.monotonic() < limit:
        # On a busy machine gRPC may give up a connection at once.
        time.sleep(_PAUSE)
        (health,) = ask([own_address], _SECONDS_TO_START)
    if health.trouble:
        raise DeviceError(f"the worker on {address} {health.trouble}")
    who = "by this machine alone"
    if ip is None or not is_loopback(ip):
        who = "by everybody who reaches that address, without authentication"
        if ip is not None and (interface := interfaces_by_address().get(ip)):
            who = f"through {socket.if_indextoname(interface)}, {who}"
    process.say(f"pipemesh worker: {address}, reached {who}; devices {', '.join(health.devices)}")


def _reached(listen: str) -> str:
    """Returns the host of the address, as others write it."""
    name = socket.gethostname() if listen in EVERYWHERE else listen
    return f"[{name}]" if ":" in name else name


def _leave(_number: int, _frame: Any) -> NoReturn:
    """Ends the process; a server of TensorFlow cannot be stopped otherwise."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)
