"""Every schedule, remat policy and execution mode gives what the plain model gives."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ScheduleError
from pipemesh.recurrent.watch.placement import record_placement
from pipemesh.schedule import Costs, forward_only, list_schedule, names, one_f_one_b, recompute
from pipemesh.schedule.builders import BUILDERS, build
from tests.conformance.remat_cases import REMAT
from tests.recurrent.stack import RUNNERS, VALUES, pipelined, plain, unstacked

NAMES = [name for name in BUILDERS if names.NAMES[name].trains]


@pytest.fixture(scope="module", params=RUNNERS)
def mode(request):
    run = RUNNERS[request.param]
    return run, run(lambda theta: plain(theta))


def assert_equal(mode, schedule, **options):
    run, expected = mode
    loss, weight, grads, each, counts, values = run(lambda t: pipelined(t, schedule, **options))
    plain_loss, plain_weight, plain_grads, plain_each, plain_values = expected
    assert weight == plain_weight
    results, wanted = [loss, each, *grads, *values], [plain_loss, plain_each, *plain_grads]
    for got, want in zip(results, [*wanted, *plain_values], strict=True):
        # Sums of floats in another order differ relative to the largest ones.
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6 * max(1, np.abs(want).max()))
    assert [int(c) for c in counts] == [schedule.num_microbatches] * schedule.num_stages


# Every schedule action by action, with a policy and a number of devices each: (mode, name, policy,
# devices, microbatches). With as many microbatches as devices or more there is a steady state.
ACTIONS = [
    ("tf1", "gpipe", "full", 4, 4),
    ("tf2", "gpipe", "none", 1, 4),
    ("tf2", "one_f_one_b", "selective", 4, 6),
    ("tf1", "one_f_one_b", "except_last", 2, 4),
    ("tf1", "interleaved_one_f_one_b", "except_last", 2, 4),
    ("tf2", "looped_bfs", "twice", 3, 3),
    ("tf1", "zb_h1", "twice", 3, 4),
    ("tf2", "zb_h2", "none", 2, 6),
    ("tf1", "zb_v", "none", 2, 4),
    ("tf2", "v_half", "full", 2, 4),
    ("tf1", "v_min", "selective", 2, 4),
    ("tf2", "dual_pipe_v", "except_last", 2, 4),
]


@pytest.mark.parametrize(
    ("mode", "name", "remat", "devices", "microbatches"), ACTIONS, indirect=["mode"]
)
def test_action_by_action_equals_the_plain_model(mode, name, remat, devices, microbatches):
    schedule = build(name, devices, microbatches)
    assert_equal(mode, schedule, remat=REMAT[remat], loop=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", RUNNERS, indirect=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("remat", REMAT)
def test_every_policy_equals_the_plain_model(mode, name, remat):
    devices = 1 + (list(BUILDERS).index(name) + list(REMAT).index(remat)) % 4
    microbatches = 12 if (name, devices) == ("dual_pipe_v", 4) else 4 if devices == 4 else 6
    assert_equal(mode, build(name, devices, microbatches), remat=REMAT[remat])


def test_every_schedule_is_run():
    assert {name for _, name, *_ in ACTIONS} == {name for name, _ in LOOPS} == {*NAMES}


@pytest.mark.parametrize(
    ("mode", "remat", "loop", "name"),
    [
        ("tf1", "none", True, "gpipe"),
        ("tf2", "full", False, "one_f_one_b"),
        ("tf1", "full", True, "interleaved"),
        ("tf2", "none", True, "zb_h1"),
        ("tf1", "none", False, "zb_v"),
    ],
    indirect=["mode"],
)
def test_recomputations_of_their_own_give_the_same(mode, remat, loop, name):
    schedule = recompute(build(name, 2, 4))
    assert schedule.recomputed()
    assert_equal(mode, schedule, remat=remat, loop=loop)


@pytest.mark.parametrize("mode", ["tf1"], indirect=True)
def test_another_policy_for_each_stage(mode):
    schedule = recompute(one_f_one_b(4, 4), stages=[1, 3])
    assert_equal(mode, schedule, remat="full,none,twice,except_last")


# Every schedule as one loop, in the two modes by turns.
LOOPS = [
    ("gpipe", "twice"),
    ("one_f_one_b", "none"),
    ("interleaved_one_f_one_b", "except_last"),
    ("looped_bfs", "selective"),
    ("zb_h1", "selective"),
    ("zb_h2", "full"),
    ("zb_v", "twice"),
    ("v_half", "except_last"),
    ("v_min", "none"),
    ("dual_pipe_v", "full"),
]


@pytest.mark.parametrize(
    ("mode", "name", "remat"),
    [(("tf1", "tf2")[turn % 2], *case) for turn, case in enumerate(LOOPS)],
    indirect=["mode"],
)
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
    two, four, eight = (graph_size(s, 6, loop=True) for s in (2, 4, 8))
    assert eight - four <= 2.2 * (four - two)


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
    assert graph_size(2, 12) == graph_size(2, 12, loop=False)
    monkeypatch.setattr("pipemesh.recurrent.table.run.LOOP_ABOVE", 40)
    monkeypatch.setattr("pipemesh.recurrent.table.run._OWN_NODES_IN_LOOP", 0)
    assert graph_size(2, 6, loop=None) == graph_size(2, 6, loop=True)


@pytest.mark.parametrize("mode", ["tf2"], indirect=True)
def test_a_table_of_ones_own(mode):
    assert_equal(mode, list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0)), remat="none")


def test_inference_has_a_loss_but_no_gradient():
    run = RUNNERS["tf2"]
    with pytest.raises(ScheduleError, match="no backward actions; use one_f_one_b"):
        run(lambda theta: pipelined(theta, forward_only(2, 4)))
