"""All-reduce between the GPUs of one host, as far as it can be tested without any."""

import pytest
import tensorflow as tf

from pipemesh.backend import nccl


@pytest.mark.parametrize(
    ("devices", "dtype"),
    [
        (["GPU:0", "GPU:1"], tf.float32),
        (["gpu:1", "GPU:0"], tf.int64),
        (["/job:w/task:1/device:GPU:0", "/job:w/task:1/device:GPU:1"], tf.float16),
    ],
)
def test_different_gpus_of_one_task_use_nccl(devices, dtype):
    assert nccl.can_reduce([tf.ones([2], dtype)] * 2, devices)


@pytest.mark.parametrize(
    ("devices", "dtype"),
    [
        (["CPU:0", "CPU:1"], tf.float32),
        (["GPU:0", "CPU:0"], tf.float32),
        (["GPU:0", "GPU:0"], tf.float32),
        (["/job:w/task:0/device:GPU:0", "/job:w/task:1/device:GPU:1"], tf.float32),
        (["GPU:0", "GPU:1"], tf.bfloat16),
    ],
)
def test_other_devices_and_dtypes_do_not_use_nccl(devices, dtype):
    assert not nccl.can_reduce([tf.ones([2], dtype)] * 2, devices)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_each_device_gives_its_tensor_and_gets_the_result(op):
    devices = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
    with tf.Graph().as_default():
        given = [tf.fill([2], float(i)) for i in range(3)]
        results = nccl.all_reduce(given, devices, op)
    assert [result.device for result in results] == devices
    for tensor, result, device in zip(given, results, devices, strict=True):
        (placed,) = result.op.inputs
        assert result.op.get_attr("reduction") == op.encode()
        assert placed.device == device and placed.op.inputs[0] is tensor
