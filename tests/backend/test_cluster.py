"""Connecting workers; `tests/hosts` tests what is computed on them."""

import socket

import pytest
import tensorflow as tf

from pipemesh.backend.cluster import connect_workers, host_of, task_of, worker_devices
from pipemesh.errors import DeviceError


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
