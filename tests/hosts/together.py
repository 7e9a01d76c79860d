"""A program that trains the small language model in several processes, or in one.

    python -m tests.hosts.together ADDRESSES INDEX STEPS FOLDER PLAN...

ADDRESSES are those of all processes with commas between, or none. Each plan has a folder of its own
in FOLDER, called 0, 1 and so on; it goes on from the newest checkpoint there, and leaves one.
Prints a line of JSON for each plan.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from absl import flags

from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices
from pipemesh.backend.processes import connect_processes
from pipemesh.checkpoint import newest
from pipemesh.layers import mesh_cluster
from pipemesh.lowering.simd.process_talk import check_alike, meet
from pipemesh.plan import Plan
from pipemesh.training.saving import Saving


def main(addresses, index, steps, folders, texts):
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
    for number_of_plan, plan in enumerate(plans):
        folder = os.path.join(folders, str(number_of_plan))
        os.makedirs(folder, exist_ok=True)
        # Dropout is on.
        config = language_model.small(PLAN=plan, NUM_LAYERS=4, DROPOUT_PROB=0.1)
        training = language_model.Training(config)
        saving = Saving(folder, training.state)
        restored = newest(folder)
        if restored:
            saving.restore(restored)
        first = int(training.state["global_step"])
        losses = []
        for number in range(first, first + steps):
            batch = language_model.random_batch(number)
            losses.append(training.step({name: tf.constant(v) for name, v in batch.items()}))
            if number == first + steps // 2:
                # Written while training goes on.
                saving.begin(number + 1, {})
                saving.confirm()
        check_alike()
        saved = saving.save(first + steps, {}, check=lambda: None)
        # Until the first process has joined it.
        meet()
        cluster = mesh_cluster(plan.mesh, layout=plan.layout, lowering=plan.lowering)
        found = {
            "losses": losses,
            "first": first,
            "saved": saved,
            "elements": sum(map(_elements, training.state.values())),
            "devices": [cluster.device(i) for i in range(plan.mesh.num_devices)],
        }
        print(json.dumps(found), flush=True)


def _elements(value):
    """How many numbers of a weight this process has."""
    parts = [variable for variable, _ in getattr(value, "parts", [(value, None)])]
    return sum(variable.shape.num_elements() for variable in parts)


if __name__ == "__main__":
    given = sys.argv[1].split(",") if sys.argv[1] else []
    main(given, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    # Python would wait for those that are connected.
    sys.stdout.flush()
    os._exit(0)
