"""Trains a network split over two hosts and prints the greatest differences from the whole one.

A process of its own, because connecting to other hosts changes TensorFlow's devices for good. The
hosts are servers on this machine, in a process each, forked before TensorFlow starts anything.
"""

import contextlib
import json
import multiprocessing
import os
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np


def serve(cluster, task, ready):
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    server = tf.distribute.Server(cluster, "worker", task, config=config)
    ready.send(server.target)
    server.join()


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def hosts(count):
    """Starts servers; gives the description of their cluster."""
    fork = multiprocessing.get_context("fork")
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(count)]}
    started = []
    try:
        for task in range(count):
            receiver, sender = fork.Pipe()
            process = fork.Process(target=serve, args=(cluster, task, sender), daemon=True)
            process.start()
            started.append((process, receiver))
        for _, ready in started:
            if not ready.poll(60):
                raise TimeoutError("a host did not start")
        yield cluster
    finally:
        for process, _ in started:
            process.kill()


def differences(devices):
    """The devices of the hidden layer's slices; differences of the loss and both gradients."""
    import tensorflow as tf

    from pipemesh.lowering import PlacementLowering, ops
    from pipemesh.mesh import LayoutRules, Mesh

    draw = np.random.default_rng(0)
    sizes = [[8, 4], [4, 8], [8, 4]]
    x, w1, w2 = (tf.constant(draw.normal(size=size).astype(np.float32)) for size in sizes)
    mesh, rules = Mesh.from_text("data:2;model:2"), LayoutRules.from_text("batch:data;hidden:model")

    placed = []

    @tf.function
    def split(x, w1, w2):
        lowering = PlacementLowering(mesh, rules, devices)
        with tf.GradientTape() as tape:
            tape.watch([w1, w2])
            named = ops.import_tensor(lowering, x, "batch:8;io:4")
            first = ops.import_tensor(lowering, w1, "io:4;hidden:8")
            second = ops.import_tensor(lowering, w2, "hidden:8;out:4")
            hidden = ops.tanh(ops.einsum([named, first], ["batch", "hidden"]))
            placed[:] = [part.device for part in hidden.slices]
            loss = ops.reduce_sum(ops.square(ops.einsum([hidden, second], ["batch", "out"])))
            exported = ops.export_tensor(loss)
        return exported, *tape.gradient(exported, [w1, w2])

    with tf.GradientTape() as tape:
        tape.watch([w1, w2])
        whole = tf.reduce_sum(tf.square(tf.tanh(x @ w1) @ w2))
    wanted = [whole, *tape.gradient(whole, [w1, w2])]
    found = split(x, w1, w2)
    return placed, [float(tf.reduce_max(tf.abs(a - b))) for a, b in zip(found, wanted, strict=True)]


def main():
    import tensorflow as tf

    from pipemesh.errors import DeviceError

    with hosts(2) as cluster:
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(cluster))
        devices = [f"/job:worker/task:{task}/device:CPU:{i}" for task in (0, 1) for i in (0, 1)]
        placed, different = differences(devices)
        result = {"devices": devices, "placed": placed, "differences": different}
        try:
            differences([*devices[:3], "/job:worker/task:2/device:CPU:0"])
        except DeviceError as error:
            result["missing"] = str(error)
        print(json.dumps(result), flush=True)
    # Without a farewell to the servers, which have been killed.
    os._exit(0)


if __name__ == "__main__":
    main()
