"""One client that drives workers: TensorFlow's distributed runtime, as this process sees it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

# Most of it is not public; TensorFlow's version is pinned.
from tensorflow.python.eager import context

from pipemesh.addresses import (
    check_addresses,
    check_free,
    host_and_port,
    ips_of,
    own_address,
    use_no_proxy,
)
from pipemesh.backend.address_filter import keep_to
from pipemesh.backend.devices import CLIENT, eager_context, is_client
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
        DeviceError: TensorFlow has started already, addresses are none or occur twice, or the port
            of this process is in use.

    Example:
        >>> connect_workers(["a"])
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: address 'a' is not host:port; write for example 'a:2222'
    """
    check_addresses([*workers, *([client] if client else [])])
    if client:
        remedy = "give this process another port, or none"
        check_free(host_and_port(client)[1], f"client address {client!r}", remedy)
    here = eager_context()
    if here._initialized:
        raise DeviceError(
            "TensorFlow has already started; connect workers before the first operation"
        )
    client = client or own_address(workers[0])
    use_no_proxy()
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
    keep_to(host_and_port(client)[1], [*ips_of(workers), "127.0.0.1"], peers=True)
    return [device for of_worker in worker_devices("") for device in of_worker]


def check_way_back(task: int) -> None:
    """Lets a worker ask this process for a tensor, as it does in each step.

    Args:
        task: of the worker.

    Raises:
        DeviceError: the worker does not reach this process.
    """
    definition = eager_context().get_server_def()
    assert definition is not None
    jobs = {job.name: job.tasks for job in definition.cluster.job}
    own, worker = jobs[CLIENT][0], f"worker {task} ({jobs[WORKER][task]})"

    def ask(x: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/job:{WORKER}/replica:0/task:{task}/device:CPU:0"):
            return x + 1.0

    try:
        with context.eager_mode(), tf.device(OWN_HOST):
            tf.function(ask, autograph=False)(tf.constant(1.0)).numpy()
    except tf.errors.UnavailableError as error:
        if f"target /job:{CLIENT}/" not in error.message:
            raise
        known = ", ".join(ips_of(list(jobs[WORKER].values())))
        # Without its cause, which looks like a connection that broke, and could be made again.
        raise DeviceError(
            f"{worker} does not reach this process at {own}, which lets in {known} and "
            "this machine; the worker may come from another of its addresses, which `ip route get "
            f"{host_and_port(own)[0]}` prints on its host as `src`: name it by that one in "
            "--cluster, or set --client_address"
        ) from None


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
