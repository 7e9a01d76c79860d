"""Connecting processes; `test_simd_pipeline_cores` tests that they compute together."""

import pytest
import tensorflow as tf

from pipemesh.backend.processes import connect_processes
from pipemesh.errors import DeviceError


def test_an_index_that_has_no_address_is_an_error():
    with pytest.raises(DeviceError, match="process 2 was asked for, but 2 addresses"):
        connect_processes(["a:1", "b:1"], 2)


def test_connecting_after_tensorflow_has_started_is_an_error():
    tf.ones([])
    with pytest.raises(DeviceError, match="before the first operation"):
        connect_processes(["localhost:1"], 0)
