"""Several processes, on one host or many, whose cores talk to each other."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

from pipemesh.addresses import check_addresses, use_no_proxy
from pipemesh.backend.eager_context import eager_context
from pipemesh.errors import DeviceError
from pipemesh.mesh.checks import whole_number

_JOB = "worker"


def connect_processes(addresses: Sequence[str], process: int, kind: str = "CPU") -> list[str]:
    """Starts this process's server, and lets collectives reach the other processes.

    Every process calls it with the same addresses before TensorFlow starts (but after
    `start_cpu_devices`), and builds the same programs in the same order. Collectives wait until
    all processes have come; nobody waits here.

    Args:
        addresses: `host:port` of each process; the first one leads the groups.
        process: the index of this one.
        kind: of the devices that are cores, `"CPU"` or `"GPU"`.

    Returns:
        The devices of this process, for `Cores`.

    Raises:
        DeviceError: `addresses` are none, `process` is no index of them, TensorFlow has started
            already, or there is no device of this kind.

    Example:
        >>> connect_processes(["localhost:2222"], 1)
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: process 1 was asked for, but 1 addresses were given: \
localhost:2222
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
            f"process {process!r} was asked for, but {len(addresses)} addresses were given: "
            f"{', '.join(addresses)}"
        )
    use_no_proxy()
    here = eager_context()
    try:
        here.configure_collective_ops(collective_leader=f"/job:{_JOB}/replica:0/task:0")
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            "processes were to be connected, but TensorFlow has already started; connect them "
            "before the first operation, and once"
        ) from error
    cluster = tf.train.ClusterSpec({_JOB: list(addresses)})
    here.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            job_name=_JOB,
            task_index=process,
            protocol="grpc",
            default_session_config=here.config,
        )
    )
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    if not devices:
        raise DeviceError(f"this process has no device of kind {kind}")
    return devices
