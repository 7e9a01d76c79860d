"""A client that adds what each of its workers computes from a tensor that the client has.

    python -m tests.hosts.connected WORKERS [SECONDS]

WORKERS are addresses with commas between, SECONDS those after which connecting is said to hang.
"""

import sys

import tensorflow as tf

from pipemesh.backend.cluster import own_host, worker_devices
from pipemesh.commands.process import exit_code
from pipemesh.hosts import Cluster, client


def main(workers, seconds="60"):
    client._CONNECTED = float(seconds)
    client.connect(Cluster.from_text(workers), answer=10.0, wait=60.0)
    with tf.device(own_host()):
        numbers = tf.constant([1.0, 2.0])

    @tf.function
    def total():
        found = numbers
        for of_worker in worker_devices("CPU"):
            with tf.device(of_worker[0]):
                found = found + numbers
        return tf.reduce_sum(found)

    print(total().numpy())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(*sys.argv[1:])))
