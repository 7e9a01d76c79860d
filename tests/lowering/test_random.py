"""Random operations on named dims inside a pipeline: a microbatch gets its slice of the batch's."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.scope import NeedWholeDraws, Position, WholeDraw, WholeDraws
from tests.devices import device_name
from tests.pairwise import in_turn

pytestmark = pytest.mark.gpu

STEP = tf.constant(3, tf.int64)
SEED = tf.constant([5, 6])
NUM_MICROBATCHES = 4
# The draw on named dims, and TensorFlow's.
DRAWS = {
    "uniform": (
        lambda lowering, shape: ops.random_uniform(lowering, shape, seed=SEED),
        lambda sizes: tf.random.stateless_uniform(sizes, SEED, alg="philox"),
    ),
    "normal": (
        lambda lowering, shape: ops.random_normal(lowering, shape, seed=SEED),
        lambda sizes: tf.random.stateless_normal(sizes, SEED, alg="philox"),
    ),
    "double": (
        lambda lowering, shape: ops.random_normal(lowering, shape, seed=SEED, dtype=tf.float64),
        lambda sizes: tf.random.stateless_normal(sizes, SEED, dtype=tf.float64, alg="philox"),
    ),
    "dropout": (
        lambda lowering, shape: ops.dropout(
            ops.import_tensor(lowering, tf.ones(shape.sizes), shape), rate=0.4, seed=SEED
        ),
        lambda sizes: tf.nn.experimental.stateless_dropout(
            tf.ones(sizes), 0.4, SEED, rng_alg="philox"
        ),
    ),
}
# Of a microbatch of 2: the shape, the dim that is cut, what is folded into it in front, layouts.
BATCH_FIRST = "batch:2;time:3;io:2", 0, 1, ["", "batch:data", "batch:data;io:model", "io:data"]
BATCH_SECOND = "time:4;batch:2;io:3", 1, 1, ["", "time:data", "time:model;batch:data"]
TIME_FOLDED = "batch:8;io:2", 0, 1, ["", "batch:data;io:model"]
BATCH_FOLDED = "time:8;io:2", 0, 4, ["", "time:data", "time:data;io:model"]
CASES = [
    (*case, rules)
    for *case, layouts in (BATCH_FIRST, BATCH_SECOND, TIME_FOLDED, BATCH_FOLDED)
    for rules in layouts
]


def make(rules):
    mesh = Mesh.from_text("data:2;model:2")
    return PlacementLowering(mesh, LayoutRules.from_text(rules), [device_name(i) for i in range(4)])


def drawn_value(draw, lowering, shape):
    return ops.export_tensor(DRAWS[draw][0](lowering, shape)).numpy()


def position(m, drawn, before=1):
    whole = None if drawn is None else WholeDraws(drawn, lambda name, dim, folded: before)
    return Position(tf.constant(m, tf.int64), NUM_MICROBATCHES, 2, whole)


@pytest.mark.parametrize(("text", "dim", "folded", "rules", "draw"), in_turn(CASES, list(DRAWS)))
def test_microbatch_draws_its_slice_of_the_whole_batchs_draw(text, dim, folded, rules, draw):
    lowering, shape = make(rules), Shape.from_text(text)
    name, size = shape.dims[dim].name, shape.dims[dim].size
    whole = shape.replace(name, Dim(name, size * NUM_MICROBATCHES))
    with plan_free_randomness(STEP) as drawn:
        value = drawn_value(draw, lowering, whole)
    np.testing.assert_array_equal(value, DRAWS[draw][1](whole.sizes).numpy())
    # `folded` rows come before the batch.
    view = value.reshape(
        [*whole.sizes[:dim], folded, NUM_MICROBATCHES, -1, *shape.sizes[dim + 1 :]]
    )
    # Names say which dim is the batch's; the whole draw does if something is folded into it.
    known = None if (name, size) == ("batch", 2) else drawn
    for m in range(NUM_MICROBATCHES):
        with plan_free_randomness(STEP, position(m, known, folded)):
            got = drawn_value(draw, lowering, shape)
        np.testing.assert_array_equal(got, np.take(view, m, dim + 1).reshape(shape.sizes))


@pytest.mark.parametrize("time", ["time", "length"])
@pytest.mark.parametrize(
    ("draw", "rules"),
    in_turn(list(DRAWS), ["", "batch:data;time:model", "time:data;io:model"]),
)
def test_a_draw_for_a_slice_is_that_of_whole_sequences(draw, rules, time):
    lowering, slices = make(rules.replace("time", time)), 2

    def shape_of(batch, length):
        return Shape.from_text(f"batch:{batch};{time}:{length};io:2")

    shape, value = shape_of(2, 4), drawn_value(draw, lowering, shape_of(8, 8))
    with plan_free_randomness(STEP) as drawn:
        drawn_value(draw, lowering, shape_of(8, 4))
    with plan_free_randomness(STEP) as of_sequences:
        drawn_value(draw, lowering, shape_of(2, 8))
    known = WholeDraws(drawn, lambda name, dim, folded: 1, of_sequences)
    # Names say which dims are those of batch and sequence.
    known = None if time == "length" else known
    for m, rows in enumerate(np.split(value, NUM_MICROBATCHES)):
        for q, wanted in enumerate(np.split(rows, slices, axis=1)):
            numbers = [tf.constant(number, tf.int64) for number in (m, q)]
            where = Position(numbers[0], NUM_MICROBATCHES, 2, known, slices, 4, numbers[1])
            with plan_free_randomness(STEP, where):
                got = drawn_value(draw, lowering, shape)
            np.testing.assert_array_equal(got, wanted)


def test_draws_of_tensorflow_and_named_dims_share_one_count():
    lowering = make("batch:data")

    def program(batch):
        plain = tf.random.stateless_uniform([batch, 2], SEED, alg="philox")
        named = ops.export_tensor(
            ops.random_uniform(lowering, Shape.of(batch=batch, io=3), seed=SEED)
        )
        weights = ops.export_tensor(ops.random_uniform(lowering, "io:3", seed=SEED))
        return plain, named, weights

    with plan_free_randomness(STEP) as drawn:
        plain, named, weights = program(8)
    # The first one is TensorFlow's own, which makes a key of the seed.
    assert [draw.sizes for draw in drawn.values()] == [(4,), (8, 2), (8, 3), (3,)]
    with plan_free_randomness(STEP, position(3, drawn)):
        got = program(2)
    for part, wanted in zip(got, (plain[6:], named[6:], weights), strict=True):
        np.testing.assert_array_equal(part.numpy(), wanted.numpy())


@pytest.mark.parametrize("shape", ["io:2", "batch:4"])
def test_where_names_do_not_say_the_batch_the_whole_draws_are_asked_for(shape):
    with plan_free_randomness(STEP, position(0, None)), pytest.raises(NeedWholeDraws):
        ops.random_uniform(make(""), shape, seed=SEED)


def test_a_draw_that_cannot_be_cut_is_an_error():
    with (
        plan_free_randomness(STEP, position(0, {":0": WholeDraw((5, 3))})),
        pytest.raises(PipelineError, match="one dim may differ, by the factor 4"),
    ):
        ops.random_uniform(make(""), "batch:2;io:3", seed=SEED)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_precision_changes_no_mask_and_no_rate(dtype):
    """Drawn in bfloat16 other elements were dropped, at 13/128 where 0.1 was asked for."""
    lowering = make("a:data;b:model")
    shape = Shape.of(a=64, b=64)

    def mask(dtype):
        x = ops.import_tensor(lowering, tf.ones(shape.sizes, dtype), shape)
        dropped = ops.dropout(x, rate=0.1, seed=SEED)
        assert dropped.dtype == dtype
        return np.asarray(dropped.numpy(), np.float32) > 0

    np.testing.assert_array_equal(mask(dtype), mask(tf.float32))
