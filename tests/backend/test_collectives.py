"""Collective operations, as far as they can be tested without GPUs and TPUs."""

import functools

import pytest
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.collectives import Meeting


@pytest.mark.parametrize(
    "kind, call",
    [
        ("CollectiveReduceV2", functools.partial(collectives.reduce, merge_op="Add")),
        ("CollectiveGatherV2", collectives.gather),
        ("CollectiveAllToAllV2", collectives.all_to_all),
    ],
)
def test_collectives_take_keys_and_the_token_of_their_core(kind, call):
    @tf.function
    def run(x, token):
        return call(x, meeting=Meeting(2, tf.constant(5), 7, token))

    specs = tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.resource)
    graph = run.get_concrete_function(*specs).graph
    (found,) = [op for op in graph.get_operations() if op.type == kind]
    assert [tf.get_static_value(x) for x in list(found.inputs)[1:4]] == [2, 5, 7]
    assert found.inputs[4] is graph.inputs[1]


@pytest.mark.parametrize(
    ("devices", "dtype", "expected"),
    [
        (["GPU:0", "GPU:1"], tf.float32, True),
        (["gpu:1", "GPU:0"], tf.int64, True),
        (["/job:w/task:1/device:GPU:0", "/job:w/task:1/device:GPU:1"], tf.float16, True),
        (["CPU:0", "CPU:1"], tf.float32, False),
        (["GPU:0", "CPU:0"], tf.float32, False),
        (["GPU:0", "GPU:0"], tf.float32, False),
        (["/job:w/task:0/device:GPU:0", "/job:w/task:1/device:GPU:1"], tf.float32, False),
        (["GPU:0", "GPU:1"], tf.bfloat16, False),
    ],
)
def test_different_gpus_of_a_task_use_nccl(devices, dtype, expected):
    assert collectives.can_use_nccl([tf.ones([2], dtype)] * 2, devices) == expected


@pytest.mark.parametrize(("count", "expected"), [(None, True), (1, True), (2, False)])
def test_logical_gpus_of_one_gpu_do_not_use_nccl(monkeypatch, count, expected):
    logical = count and [tf.config.LogicalDeviceConfiguration(1024)] * count
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: logical)
    assert collectives.can_use_nccl([tf.ones([2])] * 2, ["GPU:0", "GPU:1"]) == expected


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_each_device_gives_its_tensor_and_gets_the_result(op):
    devices = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
    with tf.Graph().as_default():
        given = [tf.fill([2], float(i)) for i in range(3)]
        results = collectives.nccl_all_reduce(given, devices, op)
    assert [result.device for result in results] == devices
    for tensor, result, device in zip(given, results, devices, strict=True):
        (placed,) = result.op.inputs
        assert result.op.get_attr("reduction") == op.encode()
        assert placed.device == device and placed.op.inputs[0] is tensor


def test_a_tpu_gets_its_groups_and_pairs_as_constants():
    groups = [[0, 1], [2, 3]]

    @tf.function
    def run(x):
        return (
            collectives.tpu_all_sum(x, groups),
            collectives.tpu_all_to_all(x, 1, 0, groups),
            collectives.tpu_permute(x, [[0, 1]]),
            collectives.tpu_permute(x, []),
        )

    graph = run.get_concrete_function(tf.TensorSpec([2, 3])).graph
    *permutes, nothing = [op for op in graph.get_operations() if op.type == "CollectivePermute"]
    operations = {op.type: op for op in graph.get_operations()}
    for kind in ("CrossReplicaSum", "AllToAll"):
        assert tf.get_static_value(operations[kind].inputs[1]).tolist() == groups
    assert operations["AllToAll"].outputs[0].shape == [1, 6]
    assert tf.get_static_value(permutes[0].inputs[1]).tolist() == [[0, 1]]
    assert nothing.inputs[1].shape == [0, 2]


@pytest.mark.parametrize(
    ("concat_dim", "split_dim", "shape"), [(0, 1, [8, 4]), (1, 0, [2, 16]), (0, 0, [4, 8])]
)
def test_a_part_goes_to_each_member_of_a_group(concat_dim, split_dim, shape):
    groups = [[0, 1], [2, 3]]

    @tf.function
    def run(x):
        return collectives.tpu_all_to_all(x, concat_dim, split_dim, groups)

    assert run.get_concrete_function(tf.TensorSpec([4, 8])).output_shapes == shape
