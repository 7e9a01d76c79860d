"""Loss curves of the examples under any plan; as a program, of several plans.

SIMD programs run in a process of their own, because after an error in a collective all later ones
fail. It reads a JSON list of plans from its input, and prints one line for each.
"""

import itertools
import json
import sys

import tensorflow as tf

from models.mnist.digits import load_digits
from models.mnist.network import MnistNetwork
from models.named_dims.trainer import TRAINERS
from models.toy import network as toy
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.mesh import LayoutRules, Mesh

STEPS = 6
BATCH = 16
NETWORKS = {
    "mnist": lambda: MnistNetwork(BATCH, hidden_size=64, seed=3),
    "toy": lambda: toy.ToyNetwork(BATCH, io_size=8, hidden_size=24, activation="none", seed=3),
    "toy relu": lambda: toy.ToyNetwork(BATCH, io_size=8, hidden_size=24, activation="relu", seed=3),
}
LEARNING_RATE = {"mnist": 0.1, "toy": 0.5, "toy relu": 0.5}


def batches(name):
    endless = load_digits()[0].batches(BATCH, 5) if name == "mnist" else toy.batches(BATCH, 8, 5)
    return list(itertools.islice(endless, STEPS))


def trainer(name, lowering, mesh_text, layout):
    mesh, rules = Mesh.from_text(mesh_text), LayoutRules.from_text(layout)
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    return TRAINERS[lowering](NETWORKS[name](), mesh, rules, devices, LEARNING_RATE[name])


def curve(name, lowering, mesh_text, layout):
    """The loss of each step, then that after the last, and the table of communication."""
    made = trainer(name, lowering, mesh_text, layout)
    data = batches(name)
    losses = [made.train_step(batch) for batch in data]
    return [*losses, made.forward(data[0])[0]], str(made.costs)


if __name__ == "__main__":
    start_cpu_devices(8)
    # Optimizing each program again for each core would take most of the time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    for plan in json.load(sys.stdin):
        print(json.dumps(curve(*plan)), flush=True)
