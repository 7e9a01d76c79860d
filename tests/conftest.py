"""Eight logical CPU devices and threads enough for all of them, before TensorFlow starts."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a worker for each core: what a test starts shall not take all of them for one
    # operation. Between operations there must be a thread for each stage that waits.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import tensorflow as tf
from absl import flags

from tests.devices import KIND

NUM_DEVICES = 8
# Bytes of a logical GPU: eight fit into a small one.
GPU_MIB = 1024

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES,
)
GPUS = tf.config.list_physical_devices("GPU") if KIND == "GPU" else []
for gpu in GPUS:
    number = -(-NUM_DEVICES // len(GPUS))
    logical = [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MIB)] * number
    tf.config.set_logical_device_configuration(gpu, logical)
# Else products have 10 bits, and sums another order each time.
tf.config.experimental.enable_tensor_float_32_execution(False)
if KIND == "GPU":
    tf.config.experimental.enable_op_determinism()
tf.config.threading.set_inter_op_parallelism_threads(NUM_DEVICES)
tf.config.threading.set_intra_op_parallelism_threads(1)

# After the devices are set: as the examples do it, and what lets tests import lingvo.
from pipemesh.backend.devices import prepare_graphs_quickly  # noqa: E402
from pipemesh.layers import lingvo_loader as lingvo_loader  # noqa: E402

prepare_graphs_quickly()

# What is imported lives on, and of a graph that is being built little is garbage: to look for it
# all the time takes a tenth of it.
gc.freeze()
gc.set_threshold(50_000, 10, 10)
# Objects after which a file is worth a collection.
_MANY = 500_000

# A machine that does other work as well is no reason to fail; and what is written in the empty
# folder of a test is read by no other.
hypothesis.settings.register_profile("pipemesh", deadline=None, database=None)
hypothesis.settings.load_profile("pipemesh")

# As in any program that runs under absl: lingvo reads its flags.
flags.FLAGS.mark_as_parsed()


def pytest_collection_modifyitems(items):
    """Skips all where GPUs were asked for and there are none."""
    if KIND == "GPU" and not GPUS:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="TensorFlow sees no GPU on this machine"))


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """Frees what files have traced, if that is much, and forgets the seed that one has set.

    Graphs are circles, which Python collects too seldom here; and TensorFlow copies the functions
    of all that are alive whenever it makes an iterator over data.
    """
    tf.random.set_seed(None)
    yield
    # Objects made since everything was looked at, which takes seconds.
    young, middle, old = gc.get_count()
    if young + gc.get_threshold()[0] * (middle + gc.get_threshold()[1] * old) > _MANY:
        gc.collect()


@pytest.fixture
def eagerly():
    """lingvo's eager mode."""
    # Only now: many rooms do without lingvo, which takes seconds.
    from lingvo.core import py_utils

    py_utils.SetEagerMode(True, test_mode=True)
    yield
    py_utils.SetEagerMode(False, test_mode=True)
