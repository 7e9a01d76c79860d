"""Devices are set up before TensorFlow starts, or an error says that it is too late."""

import subprocess

import pytest
import tensorflow as tf

from pipemesh.backend.devices import (
    check_devices_exist,
    check_threads,
    device_of_scope,
    is_device,
    processor_beside,
    short_name,
    start_cpu_devices,
)
from pipemesh.errors import DeviceError
from pipemesh.layers import mesh_cluster
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from tests.warm import warm


def test_too_late_is_an_error():
    tf.zeros([1])
    with pytest.raises(DeviceError, match="already started with 8"):
        start_cpu_devices(3)


def test_devices_threads_and_graph_optimizer_are_set_before_the_start():
    # A function that the optimizer's second pass would find to be a constant still runs right.
    code = """
import tensorflow as tf
from pipemesh.errors import DeviceError
from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices
prepare_graphs_quickly()
hidden, hide = [], tf.config.set_visible_devices
tf.config.set_visible_devices = lambda *args: hidden.append(args) or hide(*args)
start_cpu_devices(5)
assert hidden == [([], "GPU")]
@tf.function(autograph=False)
def f(x):
    return tf.reduce_sum(x * 2.0 + tf.reshape(tf.transpose(tf.transpose(x)), x.shape))
assert float(f(tf.ones([3, 4]))) == 36.0
assert tf.executing_eagerly() and len(tf.config.list_logical_devices("CPU")) == 5
assert tf.config.threading.get_inter_op_parallelism_threads() >= 5
from tensorflow.python.eager import context
rewrites = context.context().config.graph_options.rewrite_options
assert rewrites.meta_optimizer_iterations == rewrites.ONE and rewrites.disable_tfg_optimizer
try:
    prepare_graphs_quickly()
except DeviceError as error:
    assert "already started" in str(error)
else:
    raise AssertionError("no error")
"""
    subprocess.run(warm("-c", code), check=True, timeout=120)


def test_too_few_threads_are_a_warning():
    check_threads(8)
    with pytest.warns(RuntimeWarning, match="9 devices share 8 inter-op threads"):
        check_threads(9)


@pytest.mark.parametrize(
    "name",
    ["CPU:1", "cpu:1", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1",
     "/job:localhost/device:CPU:1"],
)  # fmt: skip
def test_all_spellings_of_a_device_are_the_same_device(name):
    assert check_devices_exist([name]) == ("/device:CPU:1",)


def test_the_device_of_a_tensor_is_accepted():
    with tf.device("CPU:2"):
        device = tf.ones([]).device
    assert check_devices_exist([device]) == ("/device:CPU:2",)
    mesh = Mesh.from_text("data:1")
    assert PlacementLowering(mesh, LayoutRules(), [device]).devices == ("/device:CPU:2",)
    of_lingvo = mesh_cluster(Mesh.from_text("layers:2")).WorkerDeviceInModelSplit(1)
    assert check_devices_exist([of_lingvo]) == ("/device:CPU:1",)


@pytest.mark.parametrize(
    "name",
    ["/job:worker/task:0/device:CPU:0", "/job:localhost/task:1/device:CPU:0", "TPU:0", "CPU:8"],
)
def test_devices_of_others_do_not_exist(name):
    with pytest.raises(DeviceError, match="does not exist"):
        check_devices_exist([name])


@pytest.mark.parametrize("devices", ["CPU:0", [0], ["first"], [None], 8])
def test_an_invalid_device_name_is_one_clear_line(devices):
    with pytest.raises(DeviceError, match=r"is not the name of a device|give a list of names"):
        check_devices_exist(devices)


@pytest.mark.parametrize(
    ("device", "host"),
    [
        ("CPU:3", "CPU:3"),
        ("GPU:1", "/device:CPU:0"),
        ("/job:worker/task:2/device:GPU:1", "/job:worker/task:2/device:CPU:0"),
    ],
)
def test_every_device_has_a_cpu_beside_it(device, host):
    assert processor_beside(device) == host


WHOLE = "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize(
    ("pinned", "device", "runs"),
    [(WHOLE, "CPU:1", True), ("/device:CPU:1", "CPU:0", False), ("", "CPU:0", False)],
)
def test_a_pin_without_a_device_fits_no_device(pinned, device, runs):
    assert is_device(pinned, device) == runs


def test_devices_of_workers_are_shown_with_their_task():
    assert short_name(WHOLE) == "CPU:1"
    assert short_name(WHOLE.replace("localhost", "worker")) == "/task:0/CPU:1"


def test_the_device_of_an_eager_scope_is_known():
    assert device_of_scope() == ""
    with tf.device("CPU:1"):
        assert device_of_scope().endswith("CPU:1")
