"""One client that drives workers: TensorFlow's distributed runtime, as this process sees it."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

# Most of it is not public; TensorFlow's version is pinned.
from tensorflow.python.eager import context

from pipemesh.backend.address_filter import keep_to
from pipemesh.backend.eager_context import CLIENT, eager_context, is_client
from pipemesh.errors import DeviceError

WORKER = "worker"
OWN_HOST = f"/job:{CLIENT}/replica:0/task:0/device:CPU:0"
# After so many seconds without a client a worker lets go of what it holds for it.
_KEEP_ALIVE_SECONDS = 60


def connect_workers(workers: Sequence[str], client: str | None = None) -> list[str]:
    """Makes the devices of other processes devices of this one.

    To be called before TensorFlow starts; workers are `tf.distribute.Server`s. Workers send each
    other tensors, and ask this process for those that it has, so each must reach the addresses of
    all others, and that of this process, as they are given here. What is not sent by a worker is
    refused by this process.

    Args:
        workers: `host:port` of each; their numbers are those of tasks.
        client: `host:port` of this process, as workers reach it; by default the address from which
            it reaches the first of them, with a free port.

    Returns:
        The names of the workers' devices.

    Raises:
        DeviceError: TensorFlow has started already, or addresses are none.

    Example:
        >>> connect_workers(["a"])
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: address 'a' is not host:port; write for example 'a:2222'
    """
    for address in [*workers, *([client] if client else [])]:
        check_address(address)
    here = eager_context()
    if here._initialized:
        raise DeviceError(
            "TensorFlow has already started; connect workers before the first operation"
        )
    client = client or own_address(workers[0])
    cluster = tf.train.ClusterSpec({WORKER: list(workers), CLIENT: [client]})
    context._KEEP_ALIVE_SECS = _KEEP_ALIVE_SECONDS
    here.set_server_def(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            job_name=CLIENT,
            task_index=0,
            protocol="grpc",
            default_session_config=here.config,
        )
    )
    here.ensure_initialized()
    keep_to(_port(client), [*map(_ip, workers), "127.0.0.1"], peers=True)
    return [device for of_worker in worker_devices("") for device in of_worker]


def worker_devices(kind: str) -> list[list[str]]:
    """The devices of each worker; none if this process drives no workers.

    Args:
        kind: `CPU` or `GPU`; "" for all.
    """
    if not is_client():
        return []
    definition = eager_context().get_server_def()
    assert definition is not None
    tasks = next(len(job.tasks) for job in definition.cluster.job if job.name == WORKER)
    found: list[list[str]] = [[] for _ in range(tasks)]
    for device in tf.config.list_logical_devices(kind or None):
        spec = tf.DeviceSpec.from_string(device.name)
        if spec.job == WORKER and spec.task is not None:
            found[spec.task].append(device.name)
    return found


def task_of(device: str) -> int | None:
    """The number of the worker that a device belongs to; None if it is this process's own.

    Example:
        >>> task_of("/job:worker/replica:0/task:1/device:CPU:0")
    """
    if not is_client():
        return None
    spec = tf.DeviceSpec.from_string(device)
    return spec.task if spec.job == WORKER else None


def own_host() -> str:
    """The CPU of this process, by the name that it has where there are workers, too."""
    return OWN_HOST if is_client() else "CPU:0"


def host_of(device: str) -> str:
    """The CPU of the process that a device belongs to, which has memory and files beside it.

    Example:
        >>> host_of("GPU:1")
        'CPU:0'
    """
    if task_of(device) is None:
        return own_host()
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def check_address(address: str) -> None:
    """Checks that an address is `host:port`.

    Raises:
        DeviceError: it is not.
    """
    match = re.fullmatch(r"(.+):([0-9]{1,5})", address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[2]) < 2**16:
        raise DeviceError(f"address {address!r} is not host:port; write for example 'a:2222'")


def own_address(peer: str) -> str:
    """`host:port` of this process as another one reaches it, with a port that is free now.

    Args:
        peer: `host:port` of the other one.

    Example:
        >>> own_address("127.0.0.1:2222").partition(":")[0]
        '127.0.0.1'
    """
    family, _, _, _, address = _resolved(peer)
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:
        try:
            # Of what has no connection nothing is sent: the system looks up the way.
            unsent.connect(address)
        except OSError as error:
            raise DeviceError(f"there is no way to {peer!r} ({error.strerror})") from error
        host = unsent.getsockname()[0]
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _ip(address: str) -> str:
    return str(_resolved(address)[4][0])


def _resolved(address: str) -> tuple:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return socket.getaddrinfo(host, _port(address), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise DeviceError(f"the host of {address!r} is unknown ({error.strerror})") from error
