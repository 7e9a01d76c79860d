"""One loop gives the results of the whole batch."""

import numpy as np
import pytest
import tensorflow as tf

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


def traced(schedule, count=None, **options):
    """A step of stages that multiply, and notes what they compute."""

    @tf.function(autograph=False)
    def step(x, weights):
        def make(number):
            def forward(theta, carry, inputs, microbatch, step):
                y = inputs[0] * theta[0]
                if count is not None:
                    y = tf.numpy_function(
                        lambda x, m: count.append((number, int(m))) or x,
                        [y, microbatch],
                        tf.float32,
                        stateful=False,
                    )
                    y.set_shape(inputs[0].shape)
                last = number == schedule.num_stages - 1
                return [tf.reduce_sum(y) if last else y], []

            device = f"CPU:{schedule.stage_devices[number]}"
            return Stage(f"s{number}", forward, [weights[number]], [], device)

        with tf.GradientTape() as tape:
            tape.watch(weights)
            stages = [make(number) for number in range(schedule.num_stages)]
            options_ = Options(loop=True, **options)
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=options_)
        return loss if count is not None else tape.gradient(loss, weights)

    return step


def test_each_action_is_computed_once_and_nothing_besides():
    count = []
    schedule = one_f_one_b(3, 5)
    weights = [tf.constant(2.0)] * 3
    loss = traced(schedule, count)(tf.range(5.0), weights)
    assert float(loss) == 8 * 10
    assert sorted(count) == [(stage, m) for stage in range(3) for m in range(5)]


def test_values_wait_in_arrival_buffers_or_in_indexed_ones():
    """Many that wait at once (looped_bfs), a few (interleaved)."""
    for schedule in (looped_bfs(3, 9), interleaved_one_f_one_b(4, 8)):
        count = schedule.num_microbatches
        weights = [tf.constant(1.0 + 0.1 * i) for i in range(schedule.num_stages)]
        grads = traced(schedule, remat="none")(tf.range(float(count)), weights)
        product = np.prod(weights)
        wanted = [product / w * count * (count - 1) / 2 for w in weights]
        np.testing.assert_allclose(grads, wanted, rtol=1e-5)


FLOATS, WHOLE = HomeBuffer(0, 0, tf.float32), HomeBuffer(0, 1, tf.int32)
# Three tensors, of which one is not there, on two devices.
ACCESSES = [Access(FLOATS, 0), None, Access(WHOLE, 0), Access(FLOATS, 1)]
SPECS = [
    tf.TensorSpec([2], tf.float32),
    None,
    tf.TensorSpec([], tf.int32),
    tf.TensorSpec([1], tf.float32),
]
SLOTS = {ACCESSES[0]: 2, ACCESSES[2]: 0, ACCESSES[3]: 1}


def reserved(dtype):
    return tf.raw_ops.TensorListReserve(element_shape=-1, num_elements=3, element_dtype=dtype)


def buffers_of(handles, code):
    def numbers(place, name):
        return tf.constant(code if name == "code" else SLOTS[name])

    return HomeBuffers(handles, ["CPU:1", "CPU:2"], numbers, num_roles=2)


def put_and_taken(codes):
    """One tick after another, in each of which role 0 puts the values and role 1 takes them."""
    handles = {FLOATS: [reserved(tf.float32)], WHOLE: [reserved(tf.int32)]}
    taken = []
    for code in codes:
        buffers = buffers_of(handles, code)
        values = [tf.constant([1.0, 2.0]), None, tf.constant(7), tf.constant([3.0])]
        buffers.put(0, ACCESSES, values)
        taken.append(buffers.take(1, ACCESSES, SPECS))
        handles = buffers.merged()
    return handles, taken


def test_what_is_taken_is_no_longer_held():
    with tf.Graph().as_default():
        handles, _ = put_and_taken([0, 1])
        left = [
            tf.raw_ops.TensorListGetItem(
                input_handle=handles[FLOATS][0],
                index=slot,
                element_shape=-1,
                element_dtype=tf.float32,
            )
            for slot in (1, 2)
        ]
        assert [t.shape for t in run(left)] == [(0,), (0,)]


def test_actions_share_constants():
    """Each of them would be an operation a tick."""
    with tf.Graph().as_default() as graph:
        buffers = buffers_of({FLOATS: [reserved(tf.float32)]}, 1)
        before = [op.type for op in graph.get_operations()].count("Const")
        mine = [Access(FLOATS, 0), Access(FLOATS, 1)]
        for role in (0, 1):
            buffers.take(role, mine, [tf.TensorSpec([2]), tf.TensorSpec([2])])
        consts = [op.type for op in graph.get_operations()].count("Const") - before
        # Eight slots, which are constants in this test, an empty value and a shape.
        assert consts == 8 + 2


def results_of(schedule, make, modes=MODES):
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


@pytest.mark.parametrize("schedule", [SCHEDULE, gpipe(2, MICROBATCHES)], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("remat", ["full", "both"])
def test_outputs_and_gradients_are_those_of_the_whole_batch(schedule, remat):
    modes = {key: NONE if remat == "both" and key[1] % 2 else FULL for key in MODES}
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
