"""A program that trains the small language model on workers, or in one process without any.

    python -m tests.hosts.trained WORKERS STEPS PLAN...

WORKERS are addresses with commas between, or none. Prints a line of JSON for each plan.
"""

import json
import os
import socket
import struct
import sys

import tensorflow as tf
from absl import flags

from pipemesh.backend.cluster import worker_devices
from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices
from pipemesh.hosts import Cluster
from pipemesh.hosts.client import connect
from pipemesh.layers import mesh_cluster
from pipemesh.plan import Plan


def main(workers, steps, texts):
    prepare_graphs_quickly()
    if workers:
        connect(Cluster.from_text(workers))
    else:
        start_cpu_devices(4)
    from lingvo.core import py_utils

    from tests.models.one_billion_word import language_model

    # lingvo asks for them.
    flags.FLAGS.mark_as_parsed()
    py_utils.SetEagerMode(True, test_mode=True)
    for text in texts:
        attributes = {"PLAN": Plan.from_text(text.removeprefix("wide "))}
        if text.startswith("wide "):
            attributes |= {"MODEL_DIM": 256, "HIDDEN_DIM": 16, "NUM_LAYERS": 1}
        training = language_model.Training(language_model.small(**attributes))
        batches = [
            {name: tf.constant(value) for name, value in language_model.random_batch(i).items()}
            for i in range(steps)
        ]
        losses = [training.step(batch) for batch in batches[:-1]]
        before = bytes_of_sockets()
        losses.append(training.step(batches[-1]))
        carried = bytes_of_sockets() - before
        plan = attributes["PLAN"]
        cluster = mesh_cluster(plan.mesh, layout=plan.layout, lowering=plan.lowering)
        found = {
            "losses": [loss.hex() for loss in losses],
            "weights": {name: _digest(v) for name, v in training.state.items()},
            "devices": [cluster.device(i) for i in range(plan.mesh.num_devices)],
            "bytes": carried,
            "workers": len(worker_devices("CPU")),
        }
        print(json.dumps(found), flush=True)


def bytes_of_sockets():
    """The bytes that this process has sent and received by TCP so far."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            each = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                # `tcpi_bytes_acked` and `tcpi_bytes_received` of Linux.
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                found += sum(struct.unpack_from("QQ", info, 120))
    return found


def _digest(value):
    parts = getattr(value, "parts", [(value, None)])
    return [tf.strings.as_string(tf.reduce_sum(part)).numpy().decode() for part, _ in parts]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    # Python would wait for what is connected.
    sys.stdout.flush()
    os._exit(0)
