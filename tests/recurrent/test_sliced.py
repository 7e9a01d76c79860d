"""A pipeline whose microbatches are cut into slices of sequences equals the plain model."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import (
    REMAT_POLICIES,
    ActionClock,
    Options,
    Selective,
    Stage,
    pipeline,
    pipeline_loss,
)
from pipemesh.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved_one_f_one_b,
    recompute,
    seq_one_f_one_b,
    validate,
    zb_h1,
    zb_v,
)
from pipemesh.schedule.action import needs
from tests.recurrent import sliced
from tests.recurrent.gradients import with_gradients

PICKED = Selective(lambda layer: layer == "layer1")
CASES = {
    "halves": (sliced.sliced(zb_h1(2, 4), 2), {"remat": "twice", "loop": True}),
    "lengths that differ": (
        sliced.sliced(zb_h1(2, 2), 3),
        {"remat": "twice", "slice_lengths": (4, 3, 1), "check_numerics": "all"},
    ),
    "recomputed": (recompute(seq_one_f_one_b(2, 2, 2)), {"remat": PICKED, "loop": False}),
}
MORE = {
    "actions": (seq_one_f_one_b(2, 2, 2), {"remat": "none", "loop": False}),
    "loop": (seq_one_f_one_b(2, 2, 4), {"remat": "except_last", "loop": True}),
    "as many slices as microbatches": (seq_one_f_one_b(2, 4, 4), {"remat": "full", "loop": True}),
    "one microbatch": (seq_one_f_one_b(2, 1, 4), {"remat": "full"}),
    "one stage": (seq_one_f_one_b(1, 2, 4), {"remat": "none"}),
    "V": (sliced.sliced(zb_v(2, 2), 2), {"remat": "full", "loop": False}),
    "two stages a device": (
        sliced.sliced(interleaved_one_f_one_b(2, 4, 2), 2),
        {"remat": "none", "loop": True},
    ),
    "all checks": (seq_one_f_one_b(2, 2, 2), {"check_numerics": "all"}),
}
PARAMS = [
    *(pytest.param(*case, id=name) for name, case in CASES.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.exhaustive) for name, case in MORE.items()),
]


@functools.cache
def wanted():
    return sliced.with_gradients(
        lambda *args: sliced.plain(*args)[:3], sliced.X, sliced.LABELS, sliced.SCALES
    )


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "options"), PARAMS)
def test_loss_and_gradients_equal_those_of_whole_sequences(schedule, options):
    def build(*args):
        return sliced.pipelined(*args, schedule, **options)

    got = sliced.with_gradients(build, sliced.X, sliced.LABELS, sliced.SCALES)
    sliced.assert_same(got, wanted())


@pytest.mark.slow
def test_outputs_with_the_loss_outside_equal_whole_sequences():
    schedule = sliced.sliced(gpipe(2, 2), 2)
    got = sliced.with_gradients(lambda *args: sliced.pipelined_outputs(*args, schedule), sliced.X)

    def build(weights, x):
        return sliced.plain(weights, x, sliced.LABELS, sliced.SCALES)[3:]

    sliced.assert_same(got, sliced.with_gradients(build, sliced.X))


def test_slices_of_different_lengths_share_a_variable_outside_of_theta():
    outside = tf.Variable([0.5, 2.0])

    def forward(theta, carry, inputs, microbatch, step):
        return [inputs[0] * theta[0] * outside], []

    def last(theta, carry, inputs, microbatch, step):
        (y,), _ = forward(theta, carry, inputs, microbatch, step)
        return [tf.reduce_sum(y**2)], []

    weights, x = [tf.Variable(3.0), tf.Variable(-1.0)], tf.reshape(tf.range(32.0), [2, 8, 2])

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            stages = [
                Stage(
                    f"s{i}",
                    f,
                    [tf.convert_to_tensor(weights[i])],
                    [],
                    f"CPU:{i}",
                    takes_slices=True,
                )
                for i, f in enumerate((forward, last))
            ]
            options = Options(slice_lengths=(4, 3, 1))
            loss, _, _ = pipeline_loss(stages, [x], seq_one_f_one_b(2, 2, 3), options=options)
        return loss, tape.gradient(loss, [outside, *weights])

    with tf.GradientTape() as tape:
        wanted = tf.reduce_sum((x * weights[0] * weights[1] * outside**2) ** 2)
    gradients = tape.gradient(wanted, [outside, *weights])
    loss, found = run()
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for got, expected in zip(found, gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


# A recurrence, whose initial state is a weight; time comes first.

TIME, BATCH, WIDTH = 6, 4, 3
INPUT = np.random.default_rng(0).normal(size=[TIME, BATCH, WIDTH]).astype(np.float32)


def recurrence(weight, state, x):
    outputs = []
    for one in tf.unstack(x):
        state = tf.nn.tanh(one + tf.matmul(state, weight))
        outputs.append(state)
    return tf.stack(outputs), state


@st.composite
def tables(draw):
    """Any table of two stages on one or two devices that a state can take."""
    microbatches, slices = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    devices = draw(st.integers(1, 2))
    # Microbatches in any order, each way; backwards in halves, or with a recomputation before.
    orders = {way: draw(st.permutations(range(microbatches))) for way in "FB"}
    kinds = draw(st.sampled_from(["B", "IW", "RB", "RIW"]))
    left: dict[tuple[int, str], list[Action]] = {}
    for stage in range(2):
        for kind in "F" + kinds:
            order = orders["F" if kind == "F" else "B"]
            along = range(slices) if kind == "F" else range(slices)[::-1]
            left[stage, kind] = [Action(stage, kind, m, q) for m in order for q in along]
    rows, done = [[] for _ in range(devices)], set()
    while any(left.values()):
        able = [
            key
            for key, actions in left.items()
            if actions and needed(actions[0], kinds, slices) <= done
        ]
        action = left[draw(st.sampled_from(able))].pop(0)
        rows[action.stage % devices].append(action)
        done.add(action)
    return validate(Schedule(rows, [s % devices for s in range(2)], microbatches, slices))


def needed(action, kinds, slices):
    halves = {(s, action.microbatch) for s in range(2) if "I" in kinds}
    found = {*needs(action, 2, halves, slices)}
    if action.kind in "BI" and "R" in kinds:
        found.add(action.also("R"))
    return found


def two_recurrences(weight, start, x, scales, schedule=None, **options):
    """The loss of two recurrences one after the other; each microbatch begins with `start`."""

    def first(theta, carry, inputs, microbatch, step):
        y, state = recurrence(theta[0], carry[0], inputs[0])
        with layer_scope("dropped"):
            return [tf.nn.dropout(y, 0.4), inputs[1]], [state]

    def second(theta, carry, inputs, microbatch, step):
        y, state = recurrence(theta[0], carry[0], inputs[0])
        return [tf.reduce_sum(y**2 * inputs[1])], [state]

    rows = BATCH // (schedule.num_microbatches if schedule else 1)
    state, inputs = tf.tile(start[None], [rows, 1]), [x, scales]
    if schedule is None:
        with plan_free_randomness(sliced.STEP):
            for forward in (first, second):
                inputs, _ = forward([weight], [state], inputs, None, None)
        return inputs[0]
    kinds = {"recurrent": True, "takes_slices": True}
    made = [
        Stage(forward.__name__, forward, [weight], [state], f"CPU:{device}", **kinds)
        for forward, device in zip((first, second), schedule.stage_devices, strict=True)
    ]
    options = Options(batch_dim=1, sequence_dim=0, **options)
    return pipeline_loss(made, inputs, schedule, step=sliced.STEP, options=options)[0]


RNG = np.random.default_rng(1)
VALUES = (RNG.normal(size=[WIDTH, WIDTH]), RNG.normal(size=[WIDTH]), INPUT, np.cos(INPUT))


def gradients_of(build):
    return with_gradients(lambda *args: [build(*args)], *map(np.float32, VALUES))


@functools.cache
def two_recurrences_of_whole_sequences():
    return gradients_of(two_recurrences)


def of_two_stages(text):
    """A table of one device whose actions are those of the text, in both stages."""
    cells = [stage + cell for cell in text.split() for stage in ("01" if cell[0] == "F" else "10")]
    return Schedule.from_text(" ".join(cells))


# The last microbatch first; and one in halves, across the other. Each begins with the same state.
TURNED = of_two_stages("F1.0 F1.1 F1.2 B1.2 B1.1 B1.0 F0.0 F0.1 F0.2 B0.2 B0.1 B0.0")
ACROSS = of_two_stages("F0.0 F0.1 F0.2 I0.2 W0.2 F1.0 I0.1 I0.0 W0.0 F1.1 F1.2 W0.1 B1.2 B1.1 B1.0")


@pytest.mark.slow
@example(TURNED, "none", False)
@example(ACROSS, "none", False)
@example(ACROSS, "none", True)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(tables(), st.sampled_from(REMAT_POLICIES), st.sampled_from([False, True]))
def test_any_table_that_a_state_can_take_gives_the_same(schedule, remat, loop):
    got = gradients_of(lambda *args: two_recurrences(*args, schedule, remat=remat, loop=loop))
    sliced.assert_same(got, two_recurrences_of_whole_sequences())


def positionwise(theta, carry, inputs, microbatch, step):
    return [inputs[0] * theta[0]], [carry[0] + 1]


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(inputs[0] ** 2), inputs[0]], []


def small_stages(home="CPU:0", **more):
    more = {"takes_slices": True, **more}
    return [
        Stage("a", positionwise, [tf.constant(3.0)], [tf.constant(0)], home, **more),
        Stage("b", squares, [], [], home, **more),
    ]


@pytest.mark.parametrize(("loop", "batch_dim"), [(False, 1), (True, 0)])
def test_stages_without_a_state_have_replicas_and_are_timed(loop, batch_dim):
    x = np.arange(8 * 6, dtype=np.float32).reshape([8, 6])
    x = x.T if batch_dim else x
    clock, schedule = ActionClock(), seq_one_f_one_b(2, 2, 3)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            stages = small_stages(("CPU:0", "CPU:1"))
            options = Options(batch_dim, 1 - batch_dim, loop=loop, clock=clock)
            loss, (y,), carries = pipeline_loss(stages, [x], schedule, options=options)
        return loss, y, carries[0][0], tape.gradient(loss, x)

    loss, y, count, grad = run(x)
    np.testing.assert_allclose(loss, np.sum(9 * x**2), rtol=1e-6)
    np.testing.assert_array_equal(y, 3 * x)
    np.testing.assert_array_equal(grad, 18 * x)
    # Accumulators count pieces, of each replica.
    assert count == 2 * 3 * 2
    timed = [span.action for span in clock.timeline(schedule).spans()]
    assert sorted(map(str, timed)) == sorted(str(a) for row in schedule.rows for a in row)


def test_lengths_that_are_none_of_the_slices_are_refused():
    text = "slice_lengths=.* is invalid. Give 2 lengths above 0, .* with the sum 6, the length"
    for lengths in ((6,), (4, 3), (6, 0)):
        options = Options(slice_lengths=lengths)
        with tf.Graph().as_default(), pytest.raises(PipelineError, match=text):
            schedule = sliced.sliced(gpipe(2, 2), 2)
            pipeline(small_stages(), [tf.ones([4, 6])], schedule, options=options)


@pytest.mark.parametrize(
    ("changes", "schedule", "error", "text"),
    [
        (
            {"takes_slices": False},
            sliced.sliced(gpipe(2, 2), 2),
            PipelineError,
            "stage 'a' does not say that it can be given one",
        ),
        (
            {"recurrent": True},
            of_two_stages("F0.0 F1.0 F0.1 F1.1 B1.1 B1.0 B0.1 B0.0"),
            ScheduleError,
            "tick 2: 0F1.0 follows slice 0.0",
        ),
    ],
)
def test_stages_that_cannot_take_the_slices_are_refused(changes, schedule, error, text):
    with tf.Graph().as_default(), pytest.raises(error, match=text):
        pipeline(small_stages(**changes), [tf.ones([4, 6])], schedule)


@pytest.mark.parametrize(
    ("function", "value", "text", "batch_dim", "lengths"),
    [
        (tf.math.log, -1, "microbatch 1, slice 2, forward: its output", 1, ()),
        (tf.math.sqrt, 0, "microbatch 1, slice 2, backward: the gradient of input 0", 0, ()),
        (tf.math.sqrt, 0, "microbatch 1, slice 2, backward: the gradient of input 0", 1, (3, 2, 1)),
    ],
)
def test_what_is_not_finite_says_in_which_slice(function, value, text, batch_dim, lengths):
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(function(inputs[0]))], []

    @tf.function(autograph=False)
    def run(x):
        stages = [Stage("s", forward, [], [], "CPU:0", takes_slices=True)]
        schedule = seq_one_f_one_b(1, 2, 3)
        dims = batch_dim, 1 - batch_dim
        options = Options(*dims, check_numerics="all", slice_lengths=lengths)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = pipeline_loss(stages, [x], schedule, options=options)[0]
        return tape.gradient(loss, x)

    x = np.ones([4, 6], np.float32)
    x[2, 5] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        run(tf.constant(x if batch_dim == 0 else x.T))


def test_prints_name_the_slice_and_the_replica(capfd):
    def told(theta, carry, inputs, microbatch, step):
        tf.print("saw", tf.shape(inputs[0])[0], output_stream="file:///dev/stdout")
        return inputs, []

    @tf.function(autograph=False)
    def run(x):
        stage = Stage("s", told, [], [], ["CPU:0", "CPU:1"], takes_slices=True)
        return pipeline([stage], [x], sliced.sliced(gpipe(1, 2), 2))[0]

    run(tf.ones([8, 6]))
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"stage 's', microbatch {m}, slice {q}, replica {r}: saw 2"
        for m, q, r in np.ndindex(2, 2, 2)
    ]
