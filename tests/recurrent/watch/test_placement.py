"""Reports of what ran where, read from graphs."""

import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError
from pipemesh.recurrent import Placement, record_placement


def metadata(*nodes):
    """Executed graphs of nodes, each a name, a device, and at times an operation."""
    found = tf.compat.v1.RunMetadata()
    for node in nodes:
        graph = found.partition_graphs.add()
        name, device, *operation = node
        graph.node.add(name=name, device=device, op=(operation or ["Mul"])[0])
    return found


CPU_0, CPU_1 = (f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2))


def test_operations_of_actions_are_counted_by_stage_and_device():
    placement = Placement.of(
        metadata(
            ("action_0F0/x", CPU_0),
            ("while/body/action_0B3_and_every_1/y", CPU_0),
            ("action_1I0/x", CPU_1),
            ("action_1W12", CPU_1),
            ("outside/x", CPU_1),
            ("no_action_1F0/x", CPU_0),
        ),
        ["/device:cpu:0", "CPU:1"],
    )
    # Those of loops, too.
    assert placement.found == ({"CPU:0": 2}, {"CPU:1": 2})
    assert placement.wanted == (("CPU:0",), ("CPU:1",))
    placement.check()


@pytest.mark.parametrize("op", ["_Send", "_Recv", "_HostSend", "_HostRecv"])
def test_transfers_belong_to_no_device(op):
    found = metadata(("action_0F0/x", CPU_0), ("action_0F0/y", CPU_1, op))
    assert Placement.of(found, ["CPU:0"]).found == ({"CPU:0": 1},)


def test_other_tasks_are_told_apart():
    found = metadata(("action_0F0/x", "/job:worker/replica:0/task:1/device:GPU:0"))
    placement = Placement.of(found, ["/job:worker/task:1/device:GPU:0"])
    placement.check()
    with pytest.raises(DeviceError, match="instead of GPU:0"):
        Placement.of(found, ["GPU:0"]).check()


def test_a_stage_that_is_not_there_is_an_error():
    with pytest.raises(DeviceError, match="knows no operation of stage 1; record the first step"):
        Placement.of(metadata(("action_0F0/x", CPU_0)), ["CPU:0", "CPU:1"])


def test_every_replica_runs_on_its_device_and_nothing_elsewhere():
    wanted = (("CPU:0", "CPU:1"),)
    Placement(wanted, ({"CPU:0": 3, "CPU:1": 4},)).check()
    with pytest.raises(DeviceError, match="no operation of stage 0 ran on CPU:1"):
        Placement(wanted, ({"CPU:0": 3},)).check()
    with pytest.raises(DeviceError, match="2 operations of stage 0 ran on CPU:2 instead of CPU:0,"):
        Placement(wanted, ({"CPU:0": 3, "CPU:1": 4, "CPU:2": 2},)).check()


def test_it_reads_as_a_line_a_stage():
    placement = Placement(
        (("CPU:0", "CPU:1"), "CPU:2"), ({"CPU:0": 3, "CPU:1": 4}, {"CPU:0": 1, "CPU:2": 2})
    )
    assert str(placement) == (
        "stage 0 on CPU:0, CPU:1: 3 + 4 operations\nstage 1 on CPU:2: 2 operations, and 1 on CPU:0"
    )


def test_graphs_of_functions_that_run_first_are_recorded():
    @tf.function(autograph=False)
    def step():
        with tf.name_scope("action_0F0"), tf.device("CPU:1"):
            return tf.random.uniform([]) + 1.0

    with record_placement() as graphs:
        step()
    assert Placement.of(graphs, ["CPU:1"]).found[0].keys() == {"CPU:1"}
