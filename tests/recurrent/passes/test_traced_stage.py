"""A stage's graph, addressed by the names of tensors."""

import pytest
import tensorflow as tf

from pipemesh.recurrent import Home
from pipemesh.recurrent.passes.traced_stage import place_of
from pipemesh.recurrent.passes.tracing import identity_beside

HOME = Home(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), num_replicas=2)


# Full names, short ones, none, and a device that is none of the home's.
@pytest.mark.parametrize(
    ("device", "place"),
    [("/job:localhost/replica:0/task:0/device:CPU:2", 2), ("CPU:3", 3), ("", 2), ("CPU:7", 2)],
)
def test_a_nodes_device_is_found_among_those_of_its_replica(device, place):
    assert place_of(HOME, 1, device) == place


def test_an_identity_lies_beside_what_it_is_of():
    with tf.Graph().as_default(), tf.device("CPU:1"):
        with tf.device("CPU:2"):
            x = tf.constant(1.0)
        assert identity_beside(x).device == x.device
        with tf.device(None):
            free = tf.constant(1.0)
        assert identity_beside(free).device == "/device:CPU:1"
