"""Every policy of recomputation changes memory and work, and nothing else."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import ByStage, Options, RematPolicy, predict_memory
from pipemesh.recurrent.remat import policy_of
from pipemesh.schedule import gpipe, one_f_one_b
from tests.conformance.remat_cases import REMAT
from tests.pairwise import in_turn
from tests.recurrent.stack import (
    IDS,
    LABELS,
    LAYERS,
    STEP,
    VALUES,
    pipelined,
    plain,
    run_tf2,
    stages,
    unstacked,
)

MICROBATCHES = 3
# A backward pass in halves holds more in between if all is computed again: not one of these.
SCHEDULES = {builder.__name__: builder(2, MICROBATCHES) for builder in (gpipe, one_f_one_b)}
SCHEDULE_NAME = "one_f_one_b"
SCHEDULE = SCHEDULES[SCHEDULE_NAME]


def policies(base=RematPolicy):
    """The classes of policies that the library has."""
    for policy in base.__subclasses__():
        yield policy
        yield from policies(policy)


def test_every_policy_has_a_case():
    known = {policy for policy in policies() if policy.__module__.startswith("pipemesh.")}
    # One policy a stage fits no other number of stages; `test_schedules` has it.
    assert known - {ByStage} == {type(policy_of(remat)) for remat in REMAT.values()}


@pytest.fixture(scope="module")
def expected():
    return run_tf2(plain)


@pytest.mark.parametrize(("name", "loop"), in_turn([*REMAT], [False, True]))
def test_outputs_gradients_and_weights_are_the_plain_stacks(expected, name, loop):
    """With dropout on, which must draw the same when it is computed again."""
    loss, weight, grads, each, counts, values = run_tf2(
        lambda theta: pipelined(theta, SCHEDULE, remat=REMAT[name], loop=loop)
    )
    plain_loss, plain_weight, plain_grads, plain_each, plain_values = expected
    assert weight == plain_weight
    results = [loss, each, *grads, *values]
    wanted = [plain_loss, plain_each, *plain_grads, *plain_values]
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6 * max(1, np.abs(want).max()))
    # What is computed again is not counted again.
    assert [int(count) for count in counts] == [MICROBATCHES] * 2


@functools.cache
def kept(name, schedule):
    """Predicted bytes of activations, device by device."""
    with tf.Graph().as_default():
        theta = unstacked({key: tf.constant(value) for key, value in VALUES.items()})
        found = predict_memory(
            stages(theta, SCHEDULES[schedule]),
            [tf.constant(IDS), tf.constant(LABELS)],
            SCHEDULES[schedule],
            step=tf.constant(STEP, tf.int64),
            options=Options(remat=REMAT[name]),
        )
    return [device.kept for device in found]


@pytest.mark.parametrize(("name", "schedule"), in_turn([*REMAT], [*SCHEDULES]))
def test_it_keeps_between_what_full_and_what_none_keeps(name, schedule):
    full, found, none = (kept(each, schedule) for each in ("full", name, "none"))
    for least, own, most in zip(full, found, none, strict=True):
        assert least <= own <= most
        assert least < most


@functools.cache
def work(name):
    """Counts the tanh operations of the stack's layers in the graph of a step."""

    @tf.function(autograph=False)
    def run(variables):
        with tf.GradientTape() as tape:
            tape.watch(variables)
            options = {"remat": REMAT[name], "loop": False}
            loss = pipelined(unstacked(variables), SCHEDULE, **options)[0]
        return tape.gradient(loss, variables)

    graph = run.get_concrete_function(dict(VALUES)).graph.as_graph_def()
    parts = [graph.node, *(function.node_def for function in graph.library.function)]
    return sum(node.op == "Tanh" for part in parts for node in part)


@pytest.mark.parametrize("name", REMAT)
@pytest.mark.slow
def test_what_it_does_not_keep_it_computes_again(name):
    """Seen in the graph, where the forecast of memory plays no part."""
    assert work("none") == LAYERS < work("full")
    saves = sum(kept(name, SCHEDULE_NAME)) < sum(kept("none", SCHEDULE_NAME))
    assert (work(name) > LAYERS) == saves
    assert work(name) <= work("full")
