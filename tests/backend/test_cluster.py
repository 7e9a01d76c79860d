"""Connecting workers; `tests/hosts` tests what is computed on them."""

import pytest
import tensorflow as tf

from pipemesh.backend.cluster import (
    check_address,
    connect_workers,
    own_address,
    task_of,
    worker_devices,
)
from pipemesh.errors import DeviceError


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:0", "a:65536", "a:b", 5])
def test_an_address_without_host_or_port_is_an_error(address):
    with pytest.raises(DeviceError, match="is not host:port"):
        check_address(address)


def test_connecting_after_tensorflow_has_started_is_an_error():
    tf.ones([])
    with pytest.raises(DeviceError, match="before the first operation"):
        connect_workers(["127.0.0.1:1"])


def test_a_process_that_is_alone_has_no_workers():
    assert worker_devices("CPU") == []
    assert task_of("/job:worker/replica:0/task:1/device:CPU:0") is None


def test_the_own_address_is_that_of_the_way_to_the_other():
    host, _, port = own_address("127.0.0.1:2222").rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


def test_an_unknown_host_is_named():
    with pytest.raises(DeviceError, match=r"the host of 'no-such-host.invalid:1' is unknown"):
        own_address("no-such-host.invalid:1")
