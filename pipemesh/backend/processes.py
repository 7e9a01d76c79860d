"""Several processes, on one host or many, that run one program and exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

from pipemesh.addresses import check_addresses, use_no_proxy
from pipemesh.backend.devices import eager_context
from pipemesh.errors import DeviceError
from pipemesh.mesh.checks import whole_number

_JOB = "worker"


def connect_processes(addresses: Sequence[str], process: int, kind: str = "CPU") -> list[str]:
    """Starts this process's server, and lets collectives reach the other processes.

    Each process calls it with the same addresses before TensorFlow starts (but after
    `start_cpu_devices`), and builds the same programs in the same order. This call does not
    wait: the first collective waits until all processes are connected.

    Args:
        addresses: `host:port` of each process; the first one leads the groups.
        process: the index of this process.
        kind: the kind of devices to use, `"CPU"` or `"GPU"`.

    Returns:
        The devices of this process, for `Cores`.

    Raises:
        DeviceError: `addresses` is empty, `process` is not an index of it, TensorFlow has
            already started, or this process has no device of this kind.

    Example:
        >>> connect_processes(["localhost:2222"], 1)
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: process 1 is no index of ['localhost:2222']; give 0
    """
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
        raise DeviceError(
            f"addresses are {addresses!r}; give a list of host:port, for example ['a:2222', "
            "'b:2222']"
        )
    check_addresses(addresses)
    index = whole_number(process)
    if index is None or not 0 <= index < len(addresses):
        raise DeviceError(
            f"process {process!r} is no index of {list(addresses)}; give "
            + ("0" if len(addresses) == 1 else f"0 to {len(addresses) - 1}")
        )
    use_no_proxy()
    eager = eager_context()
    try:
        eager.configure_collective_ops(collective_leader=f"/job:{_JOB}/replica:0/task:0")
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            "TensorFlow has already started, so processes cannot be connected; connect them once, "
            "before the first operation"
        ) from error
    cluster = tf.train.ClusterSpec({_JOB: list(addresses)})
    eager.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            job_name=_JOB,
            task_index=process,
            protocol="grpc",
            default_session_config=eager.config,
        )
    )
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    if not devices:
        raise DeviceError(f"this process has no device of kind {kind}")
    return devices
