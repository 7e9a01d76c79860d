"""lingvo's trainer has devices for all stages."""

import pytest
import tensorflow as tf
from lingvo.core import cluster_factory

from pipemesh.layers import lingvo_trainer


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["--run_locally=cpu", "--worker_split_size=3"], 3),
        (["--run_locally", "cpu", "-worker_split_size", "2", "--job=trainer_client"], 2),
        (["--run_locally=cpu"], 1),
        (["--run_locally=gpu", "--worker_gpus=2", "--worker_split_size=2"], 1),
        (["--worker_split_size=2"], 1),
        ([], 1),
    ],
)
def test_a_local_worker_has_as_many_cpus_as_its_split(arguments, number):
    assert lingvo_trainer.num_cpu_devices(arguments) == number


def test_servers_and_clusters_inside_have_the_devices():
    create = tf.distribute.Server.create_local_server
    with lingvo_trainer.local_cpu_devices(2):
        server = tf.distribute.Server.create_local_server()
        with tf.compat.v1.Session(server.target) as session:
            found = [device.name for device in session.list_devices()]
        params = cluster_factory.Current().params
        assert params.worker.cpus_per_replica == params.ps.cpus_per_replica == 2
    assert len([name for name in found if "device:CPU" in name]) == 2
    assert tf.distribute.Server.create_local_server == create
    assert cluster_factory.Current().params.worker.cpus_per_replica == 1
