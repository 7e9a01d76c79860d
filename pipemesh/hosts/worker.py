"""A worker: a TensorFlow server that offers the devices of this machine to a client."""

from __future__ import annotations

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
from pipemesh.hosts import processes
from pipemesh.hosts.cluster import EVERYWHERE, LOOPBACK, announce, withdraw

# Timeout for the worker to answer its own request.
_SECONDS_TO_START, _PAUSE = 30.0, 0.1
# Seconds between looks at the file by which a worker of MPI is announced.
_LOOK = 1.0


# Paths that a signal removes.
_announced: list[str] = []


def run_worker(
    port: int,
    listen: str,
    cpu_devices: int,
    parent_fd: int | None = None,
    folder: str | None = None,
) -> int:
    """Runs a worker until a signal or the end of its parent, which holds the other end of
    `parent_fd`; returns the exit code. Port 0 means a free port. A worker of `mpirun` announces
    itself in `folder`, and ends when its file there is removed.
    """
    if not 0 <= port < 2**16:
        raise DeviceError(f"--port={port}: it must be 0 or more, and below 65536")
    processes.hold_standard_files()
    ip = None
    if listen not in EVERYWHERE:
        ip = own_ip(listen, f"--listen={listen}")
    _check_free(port)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    server, port = _serve(port, ip, cpu_devices)
    name = socket.gethostname() if listen in EVERYWHERE else listen
    # As others write it.
    address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    _announce(address, ip)
    if folder:
        _announced.append(announce(folder, address))
    parent = None
    if parent_fd is not None:
        parent = socket.socket(fileno=parent_fd)
        parent.sendall(f"{address}\n".encode())
    # This returns when the parent has ended; signals end the process.
    ends, pause = [parent] if parent else [], _LOOK if folder else None
    while not select.select(ends, [], [], pause)[0]:
        if not all(map(os.path.exists, _announced)):
            break
    del server
    return 0


def _check_free(port: int) -> None:
    if port:
        check_free(port, f"--port={port}", "give another")


def _serve(port: int, ip: str | None, cpu_devices: int) -> tuple[Any, int]:
    """Starts a server, and returns it with its port; with `ip` None anyone can reach it."""
    use_no_proxy()
    import tensorflow as tf

    from pipemesh.backend.cluster import COLLECTIVE_LEADER, keep_to
    from pipemesh.backend.dataset_functions import accept_calls

    accept_calls()
    cores = os.cpu_count() or 1
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": cpu_devices},
        inter_op_parallelism_threads=max(cpu_devices, cores),
        intra_op_parallelism_threads=max(1, cores // cpu_devices),
    )
    config.experimental.collective_group_leader = COLLECTIVE_LEADER
    # Check again: loading TensorFlow takes seconds, and another process may have taken the port.
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
    """Reports on standard error that the worker answers, who can reach it, and its devices."""
    from pipemesh.hosts.health import ask

    own_address = address if ip else f"{LOOPBACK}:{address.rpartition(':')[2]}"
    limit = time.monotonic() + _SECONDS_TO_START
    while (health := ask([own_address], _SECONDS_TO_START)[0]).trouble:
        # On a busy machine gRPC may drop a connection at once.
        if time.monotonic() >= limit:
            raise DeviceError(f"the worker on {address} {health.trouble}")
        time.sleep(_PAUSE)
    who = "only programs on this machine can connect (--listen=ADDRESS lets others)"
    if ip is None or not is_loopback(ip):
        who = "everybody who reaches that address can connect, without authentication"
        if ip is not None and (interface := interfaces_by_address().get(ip)):
            who = f"{who}, through {socket.if_indextoname(interface)}"
    processes.say(f"pipemesh worker: {address}; {who}; devices {', '.join(health.devices)}")


def _leave(_number: int, _frame: Any) -> NoReturn:
    """Ends the process; a TensorFlow server cannot be stopped in any other way."""
    for path in _announced:
        withdraw(path)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)
