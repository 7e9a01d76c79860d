"""Every schedule, remat policy and execution mode gives what the plain model gives."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ScheduleError
from pipemesh.recurrent.watch.placement import record_placement
from pipemesh.schedule import Costs, forward_only, list_schedule, one_f_one_b, recompute
from pipemesh.schedule.builders import BUILDERS, build
from tests.conformance.remat_cases import REMAT
from tests.pairwise import in_turn
from tests.recurrent.stack import RUNNERS, VALUES, pipelined, plain, unstacked

NAMES = [name for name, builder in BUILDERS.items() if builder.trains]


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


def counts(name, num_devices):
    """Microbatches enough for a steady state; 12 examples divide by them."""
    if num_devices == 4:
        return 12 if name == "dual_pipe_v" else 4
    return 6


@pytest.mark.parametrize(
    ("mode", "name", "remat"),
    [
        # By default each schedule meets two policies, so two numbers of devices, one in each mode.
        pytest.param(m, n, r, marks=() if k == (j + i) % len(REMAT) else pytest.mark.exhaustive)
        for i, m in enumerate(RUNNERS)
        for j, n in enumerate(NAMES)
        for k, r in enumerate(REMAT)
    ],
    indirect=["mode"],
)
def test_loss_gradients_and_trained_weights_equal_the_plain_model(mode, name, remat):
    # A Latin square: every schedule meets every number of devices, each with another policy, and
    # the execution modes complement each other.
    policy = list(REMAT).index(remat) + 2 * (mode[0] is RUNNERS["tf1"])
    num_devices = 1 + (list(BUILDERS).index(name) + policy) % 4
    schedule = build(name, num_devices, counts(name, num_devices))
    assert_equal(mode, schedule, remat=REMAT[remat])


@pytest.mark.parametrize(
    ("mode", "remat", "loop", "name"),
    in_turn(
        [(m, r, f) for m in RUNNERS for r in ("none", "full") for f in (False, True)],
        ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v"],
    ),
    indirect=["mode"],
)
def test_recomputations_that_are_actions_of_their_own_give_the_same(mode, remat, loop, name):
    schedule = recompute(build(name, 2, 12))
    assert schedule.recomputed()
    assert_equal(mode, schedule, remat=remat, loop=loop)


def test_another_policy_for_each_stage(mode):
    schedule = recompute(one_f_one_b(4, 6), stages=[1, 3])
    assert_equal(mode, schedule, remat="full,none,twice,except_last")


@pytest.mark.parametrize(
    ("mode", "remat", "name"),
    in_turn([(mode, remat) for mode in RUNNERS for remat in REMAT], NAMES),
    indirect=["mode"],
)
def test_one_loop_gives_the_same(mode, name, remat):
    assert_equal(mode, build(name, 2 + (name == "looped_bfs"), 12), remat=REMAT[remat], loop=True)


def graph_size(schedule, **options):
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
    few, more = (graph_size(one_f_one_b(2, m), loop=True) for m in (6, 12))
    assert abs(more - few) < 10
    few, more = (graph_size(one_f_one_b(2, m), loop=False) for m in (6, 12))
    assert more - few > 100
    two, four, eight = (graph_size(one_f_one_b(s, 12), loop=True) for s in (2, 4, 8))
    assert eight - four <= 2.2 * (four - two)


@pytest.mark.slow
def test_a_tick_sends_to_a_neighbour_what_one_action_sends_and_no_flags():
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
    assert graph_size(one_f_one_b(2, 4)) == graph_size(one_f_one_b(2, 4), loop=False)
    schedule = one_f_one_b(2, 12)
    assert graph_size(schedule) == graph_size(schedule, loop=False)
    monkeypatch.setattr("pipemesh.recurrent.table.run.LOOP_ABOVE", 40)
    monkeypatch.setattr("pipemesh.recurrent.table.run._OWN_NODES_IN_LOOP", 0)
    assert graph_size(schedule) == graph_size(schedule, loop=True)


def test_a_table_of_ones_own(mode):
    assert_equal(mode, list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0)), remat="none")


def test_inference_has_a_loss_but_no_gradient():
    run = RUNNERS["tf2"]
    with pytest.raises(ScheduleError, match="no backward actions; use one_f_one_b"):
        run(lambda theta: pipelined(theta, forward_only(2, 4)))
