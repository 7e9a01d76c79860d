"""Every schedule, policy, form and number of replicas gives what the plain model gives."""

import collections
import functools

import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.errors import ScheduleError
from pipemesh.recurrent import ActionClock
from pipemesh.schedule import Costs, forward_only, list_schedule, names, one_f_one_b, recompute
from pipemesh.schedule.builders import BUILDERS, build
from tests.conformance.remat_cases import REMAT
from tests.recurrent import stack
from tests.recurrent.stack import RUNNERS, VALUES, pipelined, unstacked

pytestmark = pytest.mark.gpu

NAMES = [name for name in BUILDERS if names.NAMES[name].trains]


def assert_equal(mode, schedule, replicas=1, **options):
    counts = stack.assert_equal(mode, lambda theta: pipelined(theta, schedule, replicas, **options))
    # What goes from microbatch to microbatch goes through all replicas.
    assert counts == [schedule.num_microbatches * replicas] * schedule.num_stages
    if clock := options.get("clock"):
        spans = list(clock.timeline(schedule).spans())
        assert len(spans) == sum(map(len, schedule.rows))


ACTIONS, LOOP, COMPILED = {"loop": False}, {"loop": True}, {"loop": False, "compile": True}
# Of the mode of execution, the schedule, the form with its options, the policy and replicas.
# Policies under 1F1B are in `tests/conformance/test_remat.py`, orders in `table/test_loop_program`.
CASES = {
    "fewer microbatches than stages": ("tf2", build("1f1b", 4, 3), ACTIONS, "selective", 1),
    "halves": ("tf1", build("zb_h1", 2, 3), ACTIONS, "twice", 1),
    "both ways": ("tf2", build("dual_pipe_v", 2, 4), ACTIONS, "except_last", 1),
    "loop": ("tf1", build("gpipe", 2, 6), LOOP, "twice", 1),
    "loop of two stages a device": ("tf1", build("interleaved", 2, 6), LOOP, "except_last", 1),
    "loop of halves": ("tf2", build("zb_h1", 2, 6), LOOP, "selective", 1),
    "recomputed apart": ("tf1", recompute(build("zb_h1", 2, 4)), LOOP, "except_last", 1),
    "another policy for each stage": (
        "tf1",
        recompute(one_f_one_b(4, 4), stages=[1, 3]),
        {},
        "full,none,twice,except_last",
        1,
    ),
    "own table": (
        "tf2",
        list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0)),
        ACTIONS,
        "none",
        1,
    ),
    "replicas": ("tf1", build("gpipe", 2, 2), ACTIONS, "full", 2),
    "replicas in a loop": (
        "tf2",
        build("1f1b", 2, 3),
        {**LOOP, "clock": ActionClock()},
        "none",
        2,
    ),
    "replicas of one stage and microbatch": (
        "tf2",
        build("zb_h1", 1, 1),
        {**ACTIONS, "clock": ActionClock()},
        "none",
        3,
    ),
    "compiled": ("tf2", build("1f1b", 2, 3), COMPILED, "except_last", 1),
    "compiled halves of replicas": ("tf1", build("zb_h1", 2, 2), COMPILED, "twice", 2),
    "compiled loop": (
        "tf2",
        recompute(build("interleaved", 2, 4)),
        {**COMPILED, **LOOP},
        "selective",
        1,
    ),
}


@pytest.mark.parametrize(
    ("mode", "schedule", "options", "remat", "replicas"), CASES.values(), ids=CASES
)
def test_pipelines_equal_the_plain_model(mode, schedule, options, remat, replicas):
    assert_equal(mode, schedule, replicas, remat=REMAT.get(remat, remat), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compile", [False, True], ids=["operations", "compiled"])
@pytest.mark.parametrize("mode", RUNNERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("remat", REMAT)
def test_every_schedule_equals_the_plain_model_under_every_policy(mode, name, remat, compile):
    turn = NAMES.index(name) + list(REMAT).index(remat)
    # It selects layers of each stage.
    devices = 1 + turn % (2 if remat == "selective" else 4)
    microbatches = 12 if (name, devices) == ("dual_pipe_v", 4) else 4 if devices == 4 else 6
    schedule = build(name, devices, microbatches)
    if turn % 3 == 1:
        schedule = recompute(schedule)
    replicas = 1 + (microbatches == 6 and turn % 2)
    loop = turn % 5 > 1
    assert_equal(mode, schedule, replicas, remat=REMAT[remat], loop=loop, compile=compile)


@functools.cache
def graph_size(devices, microbatches, **options):
    schedule = one_f_one_b(devices, microbatches)

    @tf.function(autograph=False)
    def run(variables):
        with tf.GradientTape() as tape:
            tape.watch(variables)
            loss = pipelined(unstacked(variables), schedule, **options)[0]
        return tape.gradient(loss, variables)

    graph = run.get_concrete_function(dict(VALUES)).graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


@pytest.mark.slow
def test_the_graph_of_a_loop_does_not_grow_with_the_schedule():
    """Neither with its microbatches nor with the square of the number of its stages."""
    few, more = (graph_size(2, m, loop=True) for m in (3, 6))
    assert abs(more - few) < 10
    two, three, four = (graph_size(s, 3, loop=True) for s in (2, 3, 4))
    assert four - three <= 1.1 * (three - two)


@pytest.mark.slow
def test_a_tick_sends_one_actions_values_and_no_flags():
    """Without a hold, a flag of each buffer goes to where its data are made, and a copy back."""

    @tf.function(autograph=False)
    def run(variables):
        with tf.GradientTape() as tape:
            tape.watch(variables)
            schedule = build("interleaved", 4, 12)
            loss = pipelined(unstacked(variables), schedule, loop=True)[0]
        return tape.gradient(loss, variables)

    with record_placement() as graphs:
        run(dict(VALUES))
    nodes = [node for graph in graphs.partition_graphs for node in graph.node]
    sent = [n for n in nodes if n.op in ("_Send", "_HostSend") and n.name.startswith("while/")]
    flags = [node.name for node in sent if node.attr["T"].type == tf.bool.as_datatype_enum]
    assert len(flags) == 3 and all(name.startswith("while/LoopCond") for name in flags)
    ways = collections.Counter(
        (node.attr["send_device"].s[-1:], node.attr["recv_device"].s[-1:])
        for node in sent
        if node.name.startswith("while/body")
    )
    # A stage hands on two tensors, one of which has a gradient.
    assert (ways[b"1", b"2"], ways[b"2", b"1"]) == (2, 1)


@pytest.mark.slow
def test_large_schedules_are_loops_by_default(monkeypatch):
    assert graph_size(2, 3) != graph_size(2, 3, loop=True)
    monkeypatch.setattr("pipemesh.recurrent.table.run.LOOP_ABOVE", 40)
    monkeypatch.setattr("pipemesh.recurrent.table.run._OWN_NODES_IN_LOOP", 0)
    assert graph_size(2, 6, loop=None) == graph_size(2, 6, loop=True)


def test_inference_has_a_loss_but_no_gradient():
    with pytest.raises(ScheduleError, match="no backward actions; use one_f_one_b"):
        RUNNERS["tf2"](lambda theta: pipelined(theta, forward_only(2, 4)))
