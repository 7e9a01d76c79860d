"""Predicted memory and traffic, and what TensorFlow holds and sends."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory
from pipemesh.randomness import layer_scope
from pipemesh.recurrent import (
    Home,
    Options,
    Selective,
    Stage,
    pipeline_loss,
    predict_memory,
    predict_transfers,
)
from pipemesh.recurrent.forecast import DeviceMemory
from pipemesh.schedule import (
    Schedule,
    ScheduleSpec,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    recompute,
    zb_h1,
)
from tests.recurrent.sends import sends, trained

ROWS, WIDTH, HIDDEN, FLOAT = 2, 4, 32, 4
WEIGHTS = 2 * WIDTH * HIDDEN * FLOAT
# Of a microbatch: a stage's input, and what tanh and the second product need.
INPUT, INSIDE = ROWS * WIDTH * FLOAT, ROWS * HIDDEN * FLOAT


def block(theta, carry, inputs, microbatch, step):
    h = inputs[0]
    with layer_scope("wide"):
        h = tf.nn.tanh(tf.matmul(h, theta[0]))
    with layer_scope("narrow"):
        return [tf.matmul(h, theta[1])], []


def predict(schedule, forward=block, more_dims=(), **options):
    with tf.Graph().as_default():
        theta = [tf.ones([WIDTH, HIDDEN]), tf.ones([HIDDEN, WIDTH])]
        stages = [Stage(f"s{i}", forward, theta, [], "CPU:0") for i in range(schedule.num_stages)]
        x = tf.ones([ROWS * schedule.num_microbatches, *more_dims, WIDTH])
        return predict_memory(stages, [x], schedule, options=Options(**options))


@pytest.mark.parametrize(
    ("schedule", "remat", "kept"),
    [
        (gpipe(4, 8), "full", [8 * INPUT] * 4),
        (one_f_one_b(4, 8), "none", [count * (INPUT + INSIDE) for count in (4, 3, 2, 1)]),
        (
            interleaved_one_f_one_b(2, 4, 2),
            Selective(lambda name: name == "wide"),
            [5 * INPUT, 3 * INPUT],
        ),
        (
            one_f_one_b(2, 8),
            Selective(lambda name: name == "narrow"),
            [2 * (INPUT + INSIDE), INPUT + INSIDE],
        ),
        # The last stage keeps all of the microbatch that turns.
        (one_f_one_b(2, 8), "except_last", [2 * INPUT, INPUT + INSIDE]),
        # What an `R` computes is held until its backward pass.
        (
            recompute(one_f_one_b(3, 8), stages=[0]),
            "none",
            [3 * INPUT + INSIDE, 2 * (INPUT + INSIDE), INPUT + INSIDE],
        ),
        (forward_only(2, 4), "none", [0, 0]),
    ],
)
def test_a_device_holds_kept_tensors_of_microbatches_in_flight(schedule, remat, kept):
    found = predict(schedule, remat=remat)
    assert [device.kept for device in found] == kept
    if schedule.is_forward_only:
        assert found == [DeviceMemory(WEIGHTS, 0, 0)] * 2


def test_a_recomputing_second_half_is_left_only_gradients():
    once, twice = (predict(zb_h1(4, 8), remat=remat) for remat in ("full", "twice"))
    # Of so many microbatches the first half is done at most. Left to the second one are the input
    # and the gradients of both products, and by `full` also what the second product multiplies.
    assert [o.kept - t.kept for o, t in zip(once, twice, strict=True)] == [
        count * INSIDE for count in (1, 2, 3, 4)
    ]


def test_half_precision_halves_memory_except_gradients():
    full, half = predict(gpipe(1, 2)), predict(gpipe(1, 2), compute_dtype="bfloat16")
    assert half[0].weights * 2 == full[0].weights
    # The float32 weights stay beside their copies in 16 bits.
    assert (full[0].variables, half[0].variables) == (0, full[0].weights)
    assert half[0].total == 1.5 * full[0].weights + half[0].gradients + half[0].kept
    assert half[0].kept * 2 == full[0].kept
    assert half[0].gradients == full[0].gradients == np.prod([2, WIDTH, HIDDEN, FLOAT])


@pytest.mark.parametrize(("remat", "loop"), [("full", True), ("none", False)])
def test_constants_of_the_losses_gradient_are_not_kept(remat, loop):
    # Ones of the shape of y: a constant, if the optimizer can see it, of each backward action.
    microbatches, rows, width = 32, 1024, 256
    one_mb = rows * width * FLOAT

    def stretch(theta, carry, inputs, microbatch, step):
        y = inputs[0] * theta[0]
        return [tf.reduce_sum(y * y)], []

    weight, x = tf.Variable(tf.ones([width])), tf.ones([microbatches * rows, 1])

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            stages = [Stage("only", stretch, [tf.convert_to_tensor(weight)], [], "CPU:0")]
            loss, _, _ = pipeline_loss(
                stages,
                [x],
                one_f_one_b(1, microbatches),
                options=Options(remat=remat, loop=loop),
            )
        return loss, tape.gradient(loss, weight)

    memory = TensorMemory("CPU:0")
    if not memory.is_counted:
        pytest.skip("this build of TensorFlow does not count the CPU's memory")
    begin = memory.current
    run()
    assert memory.current - begin <= 4 * one_mb, "held between steps"
    memory.forget_peak()
    loss, grad = run()
    assert memory.peak - begin <= 8 * one_mb
    assert float(loss) == microbatches * rows * width
    np.testing.assert_array_equal(grad, np.full(width, 2 * microbatches * rows, np.float32))


def test_a_tensor_that_is_needed_in_several_shapes_counts_once():
    def reshaped(theta, carry, inputs, microbatch, step):
        h = tf.nn.tanh(tf.matmul(inputs[0], theta[0]))
        # The gradient of tanh needs its result, and that of the product the same in another shape.
        flat = tf.reshape(h, [2 * ROWS, HIDDEN // 2])
        return [tf.reshape(tf.matmul(flat, tf.reshape(theta[1], [HIDDEN // 2, 8])), [ROWS, 16])], []

    (device,) = predict(gpipe(1, 1), reshaped, remat="none")
    assert device.kept == INPUT + INSIDE


def test_between_halves_a_tensor_in_several_shapes_counts_once():
    """Products of more dims are products of matrices: of the same tensors in another shape."""

    def flat(theta, carry, inputs, microbatch, step):
        h = tf.nn.relu(tf.einsum("rlw,wh->rlh", inputs[0], theta[0]))
        return [tf.einsum("rlh,hw->rlw", h, theta[1])], []

    _, last = predict(zb_h1(2, 2), flat, more_dims=[3], remat="none")
    # The input, what the rectifier gives, and the gradients of what both products give.
    assert last.stages[0].pending == 3 * 2 * (INPUT + INSIDE)


HOMES = [Home(("CPU:0", "CPU:1")), Home(("CPU:2", "CPU:3"))]
INPUTS = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
W = np.random.default_rng(1).normal(size=[4, 4]).astype(np.float32)


def product(theta, carry, inputs, microbatch, step):
    return [tf.matmul(inputs[0], theta[0])], []


def squares(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(tf.matmul(inputs[0], theta[0]) ** 2)], []


def stages_of(variables, homes, owner=0):
    forwards = [product] * (len(homes) - 1) + [squares]
    return [
        Stage(f"s{i}", forward, [tf.convert_to_tensor(v)], [], home, places=[owner])
        for i, (forward, v, home) in enumerate(zip(forwards, variables, homes, strict=True))
    ]


def predicted(schedule, homes, owner=0):
    """Times and bytes by source and target, of what pairs of kinds there are."""
    with tf.Graph().as_default():
        stages = stages_of([W] * len(homes), homes, owner)
        return predict_transfers(stages, [tf.constant(INPUTS)], schedule)


def sent(schedule, homes, owner, check_numerics="off"):
    """What TensorFlow sends: by source and target the shapes, None for those of variables."""
    stages = stages_of([W] * len(homes), homes, owner)
    run = trained(stages, [INPUTS], schedule, check_numerics=check_numerics)
    found = collections.defaultdict(list)
    for made, dtype, source, target in sends(run):
        # Checks say by flags and numbers what they have found.
        if check_numerics == "off" or dtype == tf.float32.as_datatype_enum:
            shape = made.attr["shape"].shape if "shape" in made.attr else None
            size = None if shape is None else tuple(dim.size for dim in shape.dim)
            found[f"CPU:{source}", f"CPU:{target}"].append(size)
    return found


def test_gradients_are_checked_where_they_lie():
    schedule = ScheduleSpec.from_text("1f1b").build(2, 4)
    counts = [
        {pair: len(shapes) for pair, shapes in sent(schedule, HOMES, 1, check).items()}
        for check in ("off", "results")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("name", "owner"), [("1f1b", 0), ("zb_h1", 1), ("zb_v", 1)])
def test_what_is_sent_is_what_is_predicted(name, owner):
    schedule = ScheduleSpec.from_text(name).build(2, 4)
    homes = [HOMES[device] for device in schedule.stage_devices]
    of_graph = sent(schedule, homes, owner)
    shapes = {
        "activations": (2, 4),
        "gradients": (2, 4),
        "weight gradients": (4, 4),
        "weights": None,
        "outputs": (),
    }
    # The batch is a constant, of which each device has its copy.
    expected = [t for t in predicted(schedule, homes, owner) if t.what != "inputs"]
    wanted = collections.defaultdict(collections.Counter)
    for transfer in expected:
        shape = shapes[transfer.what]
        wanted[transfer.source, transfer.target][shape] += transfer.times
        elements = np.prod((4, 4) if shape is None else shape, dtype=int)
        assert transfer.bytes == 4 * transfer.times * elements
    assert of_graph.keys() == wanted.keys()
    for pair, counts in wanted.items():
        assert collections.Counter(of_graph[pair]) == counts, pair


def test_what_a_device_hands_to_itself_is_not_sent():
    found = predicted(one_f_one_b(2, 4), ["CPU:0", "CPU:0"])
    assert found == []
    table = Schedule(one_f_one_b(2, 4).rows, (0, 1), 4).only_forward()
    assert {t.what for t in predicted(table, ["CPU:0", "CPU:1"])} == {"activations"}
