"""A program that trains the small language model in several processes, or in one.

    python -m tests.hosts.together ADDRESSES INDEX STEPS PLAN...

ADDRESSES are those of all processes with commas between, or none. Prints a line of JSON for each plan.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from absl import flags

from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices
from pipemesh.backend.processes import connect_processes
from pipemesh.layers import mesh_cluster
from pipemesh.plan import Plan


def main(addresses, index, steps, texts):
    prepare_graphs_quickly()
    plans = [Plan.from_text(text) for text in texts]
    most = max(plan.mesh.num_devices for plan in plans)
    start_cpu_devices(most // max(1, len(addresses)))
    if addresses:
        connect_processes(addresses, index)
    from lingvo.core import py_utils

    from tests.models.one_billion_word import language_model

    # lingvo asks for them.
    flags.FLAGS.mark_as_parsed()
    py_utils.SetEagerMode(True, test_mode=True)
    for plan in plans:
        config = language_model.small(PLAN=plan, NUM_LAYERS=4, DROPOUT_PROB=0.1)
        training = language_model.Training(config)
        batches = [
            {name: tf.constant(value) for name, value in language_model.random_batch(i).items()}
            for i in range(steps)
        ]
        losses = [training.step(batch) for batch in batches]
        held = {
            name: [list(part.shape) for part, _ in getattr(v, "parts", [(v, None)])]
            for name, v in training.state.items()
        }
        cluster = mesh_cluster(plan.mesh, layout=plan.layout, lowering=plan.lowering)
        devices = [cluster.device(i) for i in range(plan.mesh.num_devices)]
        print(json.dumps({"losses": losses, "held": held, "devices": devices}), flush=True)


if __name__ == "__main__":
    given = sys.argv[1].split(",") if sys.argv[1] else []
    main(given, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    # Python would wait for those that are connected.
    sys.stdout.flush()
    os._exit(0)
