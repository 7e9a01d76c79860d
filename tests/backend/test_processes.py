"""Connecting processes; `test_simd_pipeline_cores` tests that they compute together."""

import pytest
import tensorflow as tf

from pipemesh.backend.processes import connect_processes
from pipemesh.errors import DeviceError


def test_an_index_that_has_no_address_is_an_error():
    with pytest.raises(
        DeviceError, match=r"process 2 is no index of \['a:1', 'b:1'\]; give 0 to 1"
    ):
        connect_processes(["a:1", "b:1"], 2)


def test_connecting_after_tensorflow_has_started_is_an_error():
    tf.ones([])
    with pytest.raises(DeviceError, match="before the first operation"):
        connect_processes(["localhost:1"], 0)
