"""One loop gives the results of the whole batch."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.loop import HomeBuffers, Loop
from pipemesh.recurrent.table.loop_program import Access, HomeBuffer
from pipemesh.recurrent.table.run import ActionByAction
from pipemesh.schedule import (
    execution_order,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
)
from tests.recurrent.calls import calling_step
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import (
    DY,
    MICROBATCHES,
    MODES,
    SCHEDULE,
    assert_close,
    small_machine,
    wanted,
)


# Values that wait at once: many, in an indexed buffer, and a few, in arrival buffers.
@pytest.mark.parametrize("schedule", [looped_bfs(3, 9), interleaved_one_f_one_b(4, 8)])
def test_each_action_is_computed_once_and_nothing_besides(schedule):
    calls, stages, count = [], range(schedule.num_stages), schedule.num_microbatches
    weights = [1.0 + 0.1 * stage for stage in stages]
    step = calling_step(
        schedule, lambda *action: calls.append(action), weights, loop=True, remat="none"
    )
    np.testing.assert_allclose(step(), 2 * np.prod(weights) ** 2 * np.arange(count), rtol=1e-5)
    assert sorted(calls) == [(s, kind, m) for s in stages for kind in "BF" for m in range(count)]


@pytest.mark.parametrize("loop", [True, False])
def test_sums_of_gradients_begin_with_nothing_that_is_kept(loop):
    """Zeros that depend on constants alone are computed before the first step, and kept."""
    memory = TensorMemory("CPU:0")
    if not memory.is_counted:
        pytest.skip("this build of TensorFlow does not count the memory of tensors")
    weights = [tf.Variable(tf.fill([1000, 1000], 1e-3)) for _ in range(2)]

    def forward(theta, carry, inputs, microbatch, step):
        # Its gradient is sparse, of which the first one is added to zeros.
        return [tf.gather(theta[0], inputs[0])], []

    def last(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(tf.matmul(inputs[0], theta[0]))], []

    @tf.function(autograph=False)
    def step():
        stages = [
            Stage(f"s{n}", function, [weights[n]], [], f"CPU:{n}")
            for n, function in enumerate((forward, last))
        ]
        with tf.GradientTape() as tape:
            loss, _, _ = pipeline_loss(
                stages, [tf.range(8)], one_f_one_b(2, 4), options=Options(loop=loop)
            )
        return [tf.reduce_sum(tf.convert_to_tensor(g)) for g in tape.gradient(loss, weights)]

    before = memory.current
    step()
    assert memory.current - before < 1e6


def summed(x):
    """A loop that begins with constants, as one does that counts."""
    begin = tf.constant(0), tf.zeros_like(x), tf.constant(0.0)
    return tf.while_loop(lambda i, *_: i < 3, lambda i, y, z: (i + 1, y + x * z, z + 1.0), begin)[1]


@tf.function(autograph=False)
def in_call(x):
    return summed(x)


def in_branch(x):
    # Known before the action, so that one side is always taken.
    return tf.cond(tf.random.stateless_uniform([], [1, 2]) < 2.0, lambda: summed(x), lambda: x)


# A stage that waits for itself would wait in TensorFlow, where no signal ends it.
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("repeat", [summed, in_call, in_branch])
def test_what_begins_with_constants_begins_only_in_actions_that_are_due(repeat):
    def stage(number):
        def forward(theta, carry, inputs, microbatch, step):
            y = repeat(inputs[0] * theta[0])
            return [tf.reduce_sum(y) if number else y], []

        return Stage(f"s{number}", forward, [tf.constant(2.0)], [], f"CPU:{number}")

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            stages, table = [stage(0), stage(1)], one_f_one_b(2, 4)
            loss, _, _ = pipeline_loss(stages, [x], table, options=Options(loop=True))
        return tape.gradient(loss, x)

    # Each loop multiplies by 0 + 1 + 2, and each stage by its weight.
    np.testing.assert_allclose(step(tf.ones([4, 2])), np.full([4, 2], 36.0))


FLOATS = HomeBuffer(0, 1, tf.float32)
# Three tensors, of which one is missing.
ACCESSES = [Access(FLOATS, 0), None, Access(FLOATS, 1)]
SPECS = [tf.TensorSpec([2]), None, tf.TensorSpec([1])]
SLOTS = {ACCESSES[0]: 2, ACCESSES[2]: 1}


def reserved():
    return tf.raw_ops.TensorListReserve(element_shape=-1, num_elements=3, element_dtype=tf.float32)


def buffers_of(handle, code):
    def numbers(place, name):
        return tf.constant(code if name == "code" else SLOTS[name])

    return HomeBuffers({FLOATS: [handle]}, ["CPU:1", "CPU:2"], numbers, num_roles=2)


def test_what_is_taken_is_no_longer_held():
    with tf.Graph().as_default():
        # Role 0 puts, at the next tick role 1 takes.
        before = buffers_of(reserved(), 0)
        before.put(0, ACCESSES, [tf.constant([1.0, 2.0]), None, tf.constant([3.0])])
        after = buffers_of(*before.merged()[FLOATS], 1)
        taken = after.take(1, ACCESSES, SPECS)
        ((handle,),) = after.merged().values()
        left = [
            tf.raw_ops.TensorListGetItem(
                input_handle=handle, index=slot, element_shape=-1, element_dtype=tf.float32
            )
            for slot in (1, 2)
        ]
        assert [t.shape for t in run(left)] == [(0,), (0,)]
        assert [t.tolist() for t in run([taken[0], taken[2]])] == [[1, 2], [3]]


def test_actions_share_constants():
    """Each of them would be an operation a tick."""
    with tf.Graph().as_default() as graph:
        buffers = buffers_of(reserved(), 1)
        before = [op.type for op in graph.get_operations()].count("Const")
        for role in (0, 1):
            buffers.take(role, ACCESSES, [SPECS[0], None, SPECS[0]])
        consts = [op.type for op in graph.get_operations()].count("Const") - before
        # Eight slots, which are constants in this test, an empty value and a shape.
        assert consts == 8 + 2


def results_of(schedule, make, modes):
    """Outputs, gradients and carries; `make` makes what performs the actions."""
    order = execution_order(schedule)
    with tf.Graph().as_default() as graph:
        machine, state = small_machine()
        values = make(machine, state, modes, order)
        values.seed([tf.constant(DY)])
        values.perform(order)
        weights = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        carries = [carry[0] for carry in values.state.carries]
        found = run(
            [[*values.outputs(), *values.input_grads(), *weights], carries], optimizes=False
        )
        return found, [op.type for op in graph.get_operations()]


def action_by_action(machine, state, modes, order):
    return ActionByAction(machine, state, modes)


MIXED = {key: NONE if key[1] % 2 else FULL for key in MODES}


@pytest.mark.parametrize(
    ("schedule", "modes"), [(SCHEDULE, MIXED), (gpipe(2, MICROBATCHES), MODES)]
)
def test_outputs_and_gradients_are_those_of_the_whole_batch(schedule, modes):
    (results, carries), operations = results_of(schedule, Loop, modes)
    assert sum("While" in kind for kind in operations) == 1
    (expected, _), _ = results_of(schedule, action_by_action, modes)
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_close(results, wanted())
    assert carries == [MICROBATCHES] * 2


ORDER = execution_order(gpipe(2, MICROBATCHES))


@pytest.mark.parametrize("make", [Loop, action_by_action])
def test_a_second_backward_pass_takes_the_same_values(make):
    forwards = [action for action in ORDER if action.kind == "F"]
    with tf.Graph().as_default():
        machine, state = small_machine()
        values = make(machine, state, MODES, ORDER)
        values.perform(forwards)
        found = []
        for factor in (1.0, 2.0):
            values.seed([factor * tf.constant(DY)])
            values.state.accumulators = [None, None]
            values.perform(ORDER[len(forwards) :])
            found += values.input_grads()
        one, two = run(found)
    of_x = wanted()[1]
    assert_close([one, two], [of_x, 2 * of_x])
