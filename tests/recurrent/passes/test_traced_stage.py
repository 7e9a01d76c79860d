"""A stage's graph, addressed by the names of tensors."""

import pytest
import tensorflow as tf

from pipemesh.recurrent import Home
from pipemesh.recurrent.passes.traced_stage import Places
from pipemesh.recurrent.passes.tracing import identity_beside

HOME = Home(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), num_replicas=2)
# Full names, short ones, none, and a device that is none of the home's.
DEVICES = {
    "first": "/job:localhost/replica:0/task:0/device:CPU:2",
    "second": "CPU:3",
    "nowhere": "",
    "strange": "CPU:7",
}


def graph():
    with tf.Graph().as_default() as found:
        for name, device in DEVICES.items():
            with tf.device(device or None):
                tf.constant(1.0, name=name)
    return found


@pytest.mark.parametrize(
    "name, place", [("first", 2), ("second", 3), ("nowhere", 2), ("strange", 2)]
)
def test_a_nodes_device_is_found_among_those_of_its_replica(name, place):
    assert Places(HOME, lambda _: 1, graph(), {}).of(f"{name}:0") == place


def test_what_stands_for_an_argument_lies_where_it_is_said_to():
    given = {"first:0": 1, "second:0": 0}
    places = Places(HOME, lambda name: int(name == "first:0"), graph(), given)
    assert [places.of("first:0"), places.of("second:0")] == [3, 0]


def test_of_replicas_of_one_device_the_number_is_the_place():
    assert Places(Home(HOME.devices), lambda _: 3, graph(), {}).of("first:0") == 3


def test_an_identity_lies_beside_what_it_is_of():
    with tf.Graph().as_default(), tf.device("CPU:1"):
        with tf.device("CPU:2"):
            x = tf.constant(1.0)
        assert identity_beside(x).device == x.device
        with tf.device(None):
            free = tf.constant(1.0)
        assert identity_beside(free).device == "/device:CPU:1"
