"""What actions need while they run, of a step that makes tensors when it says so."""

import types

import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory
from pipemesh.schedule import Schedule
from pipemesh.training.measuring.working_memory import working_memory

MB = 2**20


def tensor(megabytes):
    return tf.fill([megabytes * MB], tf.ones([], tf.uint8))


class Said:
    """Two stages that keep 2 MB and 4 MB; backward passes need 3 and 5 MB, the first one more."""

    def __init__(self, device="CPU:0"):
        self.trained = types.SimpleNamespace(all_devices=lambda: [device])
        self.plan = types.SimpleNamespace(num_stages=2)
        self.noted = None
        self.runs = 0

    def run(self):
        self.runs += 1
        kept = {}
        table = Schedule.from_text("0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
        for action in table.rows[0]:
            self.noted(action, False)
            if action.kind == "F":
                kept[action.stage] = tensor(2 + 2 * action.stage)
            else:
                needed = tensor(3 + 2 * action.stage + 20 * (not action.microbatch))
                del needed, kept[action.stage]
            self.noted(action, True)
        update = tensor(9)
        del update


def test_what_actions_and_the_update_need_is_seen():
    if not TensorMemory("CPU:0").is_counted:
        pytest.skip("this build of TensorFlow does not count the CPU's memory")
    step = Said()
    found = working_memory(step)
    assert step.runs > 1 and step.noted is None
    # The allocator gives whole pieces, which may be larger than what is asked for.
    assert all(
        need * MB <= size < 2 * need * MB for need, size in zip((3, 5), found.stages, strict=True)
    )
    assert 9 * MB <= found.update < 18 * MB


def test_where_memory_is_not_counted_nothing_is_known():
    step = Said("CPU:99")
    assert working_memory(step) is None and not step.runs
