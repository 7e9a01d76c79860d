"""Every schedule, remat policy and execution mode gives what the plain model gives."""

import collections
import functools

import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, forward_only, list_schedule, names, one_f_one_b, recompute
from pipemesh.schedule.builders import BUILDERS, build
from tests.conformance.remat_cases import REMAT
from tests.recurrent import stack
from tests.recurrent.stack import RUNNERS, VALUES, pipelined, unstacked

NAMES = [name for name in BUILDERS if names.NAMES[name].trains]


def assert_equal(mode, schedule, **options):
    counts = stack.assert_equal(mode, lambda theta: pipelined(theta, schedule, **options))
    assert counts == [schedule.num_microbatches] * schedule.num_stages


def exhaustive(*case):
    return pytest.param(*case, marks=pytest.mark.exhaustive)


# Every schedule action by action: (mode, name, policy, devices, microbatches). Schedules that
# differ from others in their order alone are exhaustive: the program of their order is replayed
# for each in `table/test_loop_program.py`.
ACTIONS = [
    ("tf1", "gpipe", "full", 2, 1),
    ("tf2", "gpipe", "none", 1, 4),
    ("tf2", "one_f_one_b", "selective", 4, 3),
    ("tf1", "interleaved_one_f_one_b", "except_last", 2, 4),
    ("tf1", "zb_h1", "twice", 2, 3),
    ("tf2", "dual_pipe_v", "except_last", 2, 4),
    exhaustive("tf1", "one_f_one_b", "except_last", 1, 1),
    exhaustive("tf2", "looped_bfs", "twice", 3, 3),
    exhaustive("tf2", "zb_h2", "none", 2, 6),
    exhaustive("tf1", "zb_v", "none", 2, 4),
    exhaustive("tf2", "v_half", "full", 2, 4),
    exhaustive("tf1", "v_min", "selective", 2, 4),
]


@pytest.mark.parametrize(("mode", "name", "remat", "devices", "microbatches"), ACTIONS)
def test_action_by_action_equals_the_plain_model(mode, name, remat, devices, microbatches):
    schedule = build(name, devices, microbatches)
    assert_equal(mode, schedule, remat=REMAT[remat], loop=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", RUNNERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("remat", REMAT)
def test_every_policy_equals_the_plain_model(mode, name, remat):
    turn = list(BUILDERS).index(name) + list(REMAT).index(remat)
    # It selects layers of each stage.
    devices = 1 + turn % (2 if remat == "selective" else 4)
    microbatches = 12 if (name, devices) == ("dual_pipe_v", 4) else 4 if devices == 4 else 6
    assert_equal(mode, build(name, devices, microbatches), remat=REMAT[remat])


def test_every_schedule_is_run():
    for cases in (ACTIONS, LOOPS):
        assert {getattr(case, "values", case)[1] for case in cases} == {*NAMES}


@pytest.mark.parametrize(
    ("mode", "remat", "loop", "name"),
    [
        ("tf2", "full", False, "one_f_one_b"),
        ("tf1", "none", True, "zb_h1"),
        exhaustive("tf1", "none", True, "gpipe"),
        exhaustive("tf1", "full", True, "interleaved"),
        exhaustive("tf1", "none", False, "zb_v"),
    ],
)
def test_recomputations_of_their_own_give_the_same(mode, remat, loop, name):
    schedule = recompute(build(name, 2, 4))
    assert schedule.recomputed()
    assert_equal(mode, schedule, remat=remat, loop=loop)


def test_another_policy_for_each_stage():
    schedule = recompute(one_f_one_b(4, 4), stages=[1, 3])
    assert_equal("tf1", schedule, remat="full,none,twice,except_last")


# Every schedule as one loop.
LOOPS = [
    ("tf1", "gpipe", "twice"),
    ("tf2", "one_f_one_b", "none"),
    ("tf1", "interleaved_one_f_one_b", "except_last"),
    ("tf2", "zb_h1", "selective"),
    exhaustive("tf2", "looped_bfs", "full"),
    exhaustive("tf2", "zb_h2", "full"),
    exhaustive("tf1", "zb_v", "twice"),
    exhaustive("tf2", "v_half", "except_last"),
    exhaustive("tf1", "v_min", "none"),
    exhaustive("tf2", "dual_pipe_v", "full"),
]


@pytest.mark.parametrize(("mode", "name", "remat"), LOOPS)
def test_one_loop_gives_the_same(mode, name, remat):
    devices, microbatches = (3, 12) if name == "looped_bfs" else (2, 6)
    assert_equal(mode, build(name, devices, microbatches), remat=REMAT[remat], loop=True)


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
    few, more = (graph_size(2, m, loop=False) for m in (3, 12))
    assert more - few > 100
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
    assert graph_size(2, 3) == graph_size(2, 3, loop=False)
    monkeypatch.setattr("pipemesh.recurrent.table.run.LOOP_ABOVE", 40)
    monkeypatch.setattr("pipemesh.recurrent.table.run._OWN_NODES_IN_LOOP", 0)
    assert graph_size(2, 6, loop=None) == graph_size(2, 6, loop=True)


def test_a_table_of_ones_own():
    assert_equal("tf2", list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0)), remat="none")


def test_inference_has_a_loss_but_no_gradient():
    with pytest.raises(ScheduleError, match="no backward actions; use one_f_one_b"):
        RUNNERS["tf2"](lambda theta: pipelined(theta, forward_only(2, 4)))
