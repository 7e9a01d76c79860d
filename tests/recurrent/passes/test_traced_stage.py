"""A stage's graph, addressed by the names of tensors."""

import pytest
import tensorflow as tf

from pipemesh.recurrent import Home, Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage, place_of
from pipemesh.recurrent.passes.tracing import identity_beside

HOME = Home(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), num_replicas=2)
# Full names, short ones, none, and a device that is none of the home's.
DEVICES = {
    "first": "/job:localhost/replica:0/task:0/device:CPU:2",
    "second": "CPU:3",
    "nowhere": "",
    "strange": "CPU:7",
}


@pytest.mark.parametrize(
    "name, place", [("first", 2), ("second", 3), ("nowhere", 2), ("strange", 2)]
)
def test_a_nodes_device_is_found_among_those_of_its_replica(name, place):
    assert place_of(HOME, 1, DEVICES[name]) == place


def test_what_stands_for_an_argument_lies_where_it_is_said_to():
    def product(theta, carry, inputs, microbatch, step):
        return [inputs[0] * theta[0]], []

    with tf.Graph().as_default():
        stage = Stage("s", product, [tf.constant(2.0)], [], HOME, places=[1])
        specs, cutting = [tf.TensorSpec([2])], Cutting(2, 4, 0, replicas=2)
        traced = TracedStage(stage, specs, cutting, True, lambda: None, [1])
        traced.differentiate([0])
    assert [*map(traced.place, [*traced.theta, *traced.inputs])] == [1, 3, 1, 3]


def test_of_replicas_of_one_device_the_number_is_the_place():
    assert place_of(Home(HOME.devices), 3, "CPU:7") == 3


def test_an_identity_lies_beside_what_it_is_of():
    with tf.Graph().as_default(), tf.device("CPU:1"):
        with tf.device("CPU:2"):
            x = tf.constant(1.0)
        assert identity_beside(x).device == x.device
        with tf.device(None):
            free = tf.constant(1.0)
        assert identity_beside(free).device == "/device:CPU:1"
