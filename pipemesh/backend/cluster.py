"""A client that drives workers through TensorFlow's distributed runtime."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

# The context is mostly private; TensorFlow's version is pinned to 2.21.
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
# The task that forms the groups of collective operations; both sides have to know it.
COLLECTIVE_LEADER = f"/job:{WORKER}/replica:0/task:0"
OWN_HOST = f"/job:{CLIENT}/replica:0/task:0/device:CPU:0"
# A worker frees a client's resources after so many seconds without contact.
_KEEP_ALIVE_SECONDS = 60


def connect_workers(workers: Sequence[str], client: str | None = None) -> list[str]:
    """Makes the devices of other processes devices of this one.

    Call it before TensorFlow starts. Workers are `tf.distribute.Server`s. They send tensors to each
    other and fetch tensors from this process, so each must reach all addresses given here. This
    process refuses connections from any other address.

    Args:
        workers: `host:port` of each, in the order of their task numbers.
        client: `host:port` by which workers reach this process; by default the address from which
            this process reaches the first worker, with a free port.

    Returns:
        The names of the workers' devices.

    Raises:
        DeviceError: TensorFlow has already started, an address is invalid or occurs twice, or the
            port of this process is in use.

    Example:
        >>> connect_workers(["a"])
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: address 'a' is not host:port; write for example 'a:2222'
    """
    check_addresses([*workers, *([client] if client else [])])
    if client:
        remedy = "give this process another port, or none"
        check_free(host_and_port(client)[1], f"client address {client!r}", remedy)
    eager = eager_context()
    if eager._initialized:
        raise DeviceError(
            "TensorFlow has already started; connect workers before the first operation"
        )
    client = client or own_address(workers[0])
    use_no_proxy()
    cluster = tf.train.ClusterSpec({WORKER: list(workers), CLIENT: [client]})
    context._KEEP_ALIVE_SECS = _KEEP_ALIVE_SECONDS
    eager.configure_collective_ops(collective_leader=COLLECTIVE_LEADER)
    eager.set_server_def(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            job_name=CLIENT,
            task_index=0,
            protocol="grpc",
            default_session_config=eager.config,
        )
    )
    eager.ensure_initialized()
    keep_to(host_and_port(client)[1], [*ips_of(workers), "127.0.0.1"], peers=True)
    return [device for devices in worker_devices("") for device in devices]


def check_way_back(task: int) -> None:
    """Checks that a worker can fetch a tensor from this process, as it does in each step."""
    definition = eager_context().get_server_def()
    assert definition is not None
    jobs = {job.name: job.tasks for job in definition.cluster.job}
    client, worker = jobs[CLIENT][0], f"worker {task} ({jobs[WORKER][task]})"

    def fetch(x: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/job:{WORKER}/replica:0/task:{task}/device:CPU:0"):
            return x + 1.0

    try:
        with context.eager_mode(), tf.device(OWN_HOST):
            tf.function(fetch, autograph=False)(tf.constant(1.0)).numpy()
    except tf.errors.UnavailableError as error:
        if f"target /job:{CLIENT}/" not in error.message:
            raise
        allowed = ", ".join(ips_of(list(jobs[WORKER].values())))
        # Without the cause, which looks like a broken connection that a retry could restore.
        raise DeviceError(
            f"{worker} does not reach this process at {client}, which lets in {allowed} and "
            "this machine; the worker may come from another of its addresses, which `ip route get "
            f"{host_and_port(client)[0]}` prints on its host as `src`: name it by that one in "
            "--cluster, or set --client_address"
        ) from None


def worker_devices(kind: str) -> list[list[str]]:
    """Returns the devices of each worker, of one kind or all (`""`); empty without workers."""
    if not is_client():
        return []
    definition = eager_context().get_server_def()
    assert definition is not None
    tasks = next(len(job.tasks) for job in definition.cluster.job if job.name == WORKER)
    devices: list[list[str]] = [[] for _ in range(tasks)]
    for device in tf.config.list_logical_devices(kind or None):
        spec = tf.DeviceSpec.from_string(device.name)
        if spec.job == WORKER and spec.task is not None:
            devices[spec.task].append(device.name)
    return devices


def task_of(device: str) -> int | None:
    """Returns the number of the worker that a device belongs to, None for this process."""
    if not is_client():
        return None
    spec = tf.DeviceSpec.from_string(device)
    return spec.task if spec.job == WORKER else None


def own_host() -> str:
    """Returns this process's CPU, by a name that is also valid if there are workers."""
    return OWN_HOST if is_client() else "CPU:0"


def host_of(device: str) -> str:
    """Returns the CPU of the process that a device belongs to."""
    if task_of(device) is None:
        return own_host()
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()
