"""Which example of the batch each element of a graph's tensors belongs to."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.randomness.example_flow import DrawsOfStage, ExampleFlow, labels_of_batch
from pipemesh.randomness.example_labels import NO_EXAMPLE, NO_EXAMPLES, SEVERAL, along

BATCH, TIME, WIDTH = 4, 3, 6
# Those along the second dim, of [TIME, BATCH, WIDTH].
LABEL = along(1, 3, np.arange(BATCH))
WHOLE = np.broadcast_to(LABEL, [TIME, BATCH, WIDTH])


def label_of(function, label=LABEL, sizes=(TIME, BATCH, WIDTH), dtype=tf.float32):
    """The label of what the function makes of a tensor, in the sizes of the result."""
    traced = tf.function(function, autograph=False).get_concrete_function(
        tf.TensorSpec(sizes, dtype)
    )
    graph = traced.graph
    labels = [label] + [NO_EXAMPLES] * (len(graph.inputs) - 1)
    found = ExampleFlow(graph, labels).label(graph.outputs[0])
    return None if found is None else np.broadcast_to(found, graph.outputs[0].shape)


def loop_of_unknown_rank(x):
    shapes = (tf.TensorShape([]), tf.TensorShape(None))
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, 1 * y), (0, x), shapes)[1]


MOVES = {
    "reshape joins": lambda x: tf.reshape(x, [TIME * BATCH, WIDTH]),
    "reshape cuts": lambda x: tf.reshape(x, [TIME, BATCH, 2, 3]),
    "reshape joins and cuts": lambda x: tf.reshape(x, [TIME, 2, 4 * WIDTH // 2]),
    "reshape to one": lambda x: tf.reshape(x, [-1]),
    "reshape and back": lambda x: tf.reshape(tf.reshape(x, [-1, 2]), x.shape),
    "reshape with ones": lambda x: tf.reshape(x, [1, TIME, 1, BATCH, WIDTH, 1]),
    "transpose": lambda x: tf.transpose(x, [2, 1, 0]),
    "expand": lambda x: x[:, :, None],
    "squeeze": lambda x: tf.squeeze(x[:1], 0),
    "split and concat": lambda x: tf.concat(tf.split(x, 2, -1), 1),
    "uneven split": lambda x: tf.concat(tf.split(x, [1, 3], 1)[::-1], 1),
    "concat of parts": lambda x: tf.concat([x[:, :1], x[:, 2:]], 1),
    "stack": lambda x: tf.stack([x, x], 1),
    "unstack": lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], 1),
    "slice": lambda x: tf.slice(x, [1, 2, 0], [2, 2, 6]),
    "strided slice": lambda x: x[::-1, 1::2, ..., 0],
    "last": lambda x: x[..., -1, :],
    "tile": lambda x: tf.tile(x, [1, 2, 1]),
    "broadcast": lambda x: tf.broadcast_to(x, [2, TIME, BATCH, WIDTH]),
    "pad": lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 0]], constant_values=NO_EXAMPLE),
    "mirror pad": lambda x: tf.pad(x, [[0, 0], [2, 1], [0, 0]], "REFLECT"),
    "reverse": lambda x: tf.reverse(x, [1]),
    "gather": lambda x: tf.gather(x, [3, 0, 0], axis=1),
    "cast": lambda x: tf.cast(tf.identity(x), tf.float64),
    "a function": lambda x: tf.function(lambda y: tf.transpose(y, [1, 0, 2]))(x),
    "a loop": lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, 1 * y), (0, x))[1],
    "a loop of unknown rank": lambda x: tf.ensure_shape(loop_of_unknown_rank(x), x.shape),
    "a branch": lambda x: tf.cond(tf.size(x) > 0, lambda: x[:, ::-1], lambda: 1 * x[:, ::-1]),
    "a custom gradient": lambda x: tf.custom_gradient(lambda y: (tf.identity(y), lambda g: g))(x),
}


@pytest.mark.parametrize("name", MOVES)
def test_labels_move_as_elements_do(name):
    moved = MOVES[name](tf.constant(WHOLE))
    np.testing.assert_array_equal(label_of(MOVES[name], dtype=tf.int32), moved)


def weights(*sizes):
    return tf.ones(sizes)


BY_EXAMPLE = np.arange(BATCH)
KEEPS = {
    "product": (lambda x: tf.matmul(x, weights(TIME, WIDTH, 5)), [TIME, BATCH, 5], 1),
    "einsum": (lambda x: tf.einsum("tbi,ij->btj", x, weights(WIDTH, 5)), [BATCH, TIME, 5], 0),
    "einsum of any rank": (lambda x: tf.einsum("...i,ij->...j", x, weights(WIDTH, 2)), None, 1),
    "attention": (lambda x: tf.einsum("tbi,sbi->bts", x, x), [BATCH, TIME, TIME], 0),
    "sum": (lambda x: tf.reduce_sum(x, [0, 2]), [BATCH], 0),
    "kept sum": (lambda x: tf.reduce_max(x, -1, keepdims=True), [TIME, BATCH, 1], 1),
    "softmax": (tf.nn.softmax, [TIME, BATCH, WIDTH], 1),
    "cumulative": (lambda x: tf.cumsum(x, 2), [TIME, BATCH, WIDTH], 1),
    "normalization": (lambda x: x - tf.reduce_mean(x, 1, keepdims=True), None, 1),
    "lookup": (lambda x: tf.gather(weights(9, 5), tf.cast(x, tf.int32)), None, 1),
    "one hot": (lambda x: tf.one_hot(tf.cast(x, tf.int32), 5), None, 1),
    "convolution": (
        lambda x: tf.nn.conv1d(tf.transpose(x, [1, 0, 2]), weights(2, WIDTH, 5), 1, "SAME"),
        [BATCH, TIME, 5],
        0,
    ),
    "rows of a list": (lambda x: tf.scan(lambda a, b: a + b, x), [TIME, BATCH, WIDTH], 1),
    "cross entropy": (
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.zeros([TIME, BATCH], tf.int32), x
        ),
        [TIME, BATCH],
        1,
    ),
}


@pytest.mark.parametrize("name", KEEPS)
def test_results_of_one_example_belong_to_it(name):
    function, sizes, dim = KEEPS[name]
    found = label_of(function)
    assert sizes is None or list(found.shape) == sizes
    want = along(dim, found.ndim, BY_EXAMPLE)
    np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape))


def test_results_of_two_examples_belong_to_several():
    pairs = label_of(lambda x: x[0, :, None, 0] * x[0, None, :, 0])
    np.testing.assert_array_equal(pairs, np.where(np.eye(BATCH) > 0, BY_EXAMPLE, SEVERAL))


def test_sums_over_the_batch_and_constants_belong_to_none():
    assert (label_of(lambda x: tf.reduce_mean(x, 1)) == NO_EXAMPLE).all()
    assert (label_of(lambda x: tf.zeros_like(x)) == NO_EXAMPLE).all()
    assert (label_of(lambda x: tf.sort(weights(3))) == NO_EXAMPLE).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.roll(x, 1, 1),
        lambda x: tf.gather(x, tf.cast(x[0, :, 0], tf.int32), axis=1),
        lambda x: tf.function(lambda y: tf.roll(y, 1, 0))(x) + 1,
        lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y[:, ::-1]), (0, x))[1],
    ],
)
def test_operations_without_a_rule_are_unknown(function):
    assert label_of(function) is None


def test_large_labels_are_not_looked_at():
    sizes = (1 << 13, 1 << 13)
    assert label_of(lambda x: tf.transpose(x) * x, along(0, 2, np.arange(sizes[0])), sizes) is None


HEADS = 3


def draws_of(stage, sizes=(BATCH, HEADS), dim=0):
    """Returns the draws of a stage whose input has the batch in a dim, and its graph."""
    drawn = {}

    def run(x):
        with plan_free_randomness(tf.constant(3, tf.int64)) as noted, layer_scope("layer"):
            y = stage(x)
        drawn.update(noted)
        return y

    graph = tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec(sizes)).graph
    x = graph.inputs[0]
    labels = labels_of_batch([x], dim)
    return DrawsOfStage(graph, drawn, lambda: {x.name: labels[0]}, BATCH), graph


def before(stage, folded=HEADS, **given):
    """Returns how many of the elements that are folded into dim 0 come before the examples."""
    draws, _ = draws_of(stage, **given)
    (name,) = draws.whole.by_name
    return draws.whole.before(name, 0, folded)


def noise(x):
    return x * tf.random.uniform([BATCH * HEADS])


def heads_first(x):
    return tf.transpose(tf.reshape(noise(tf.reshape(tf.transpose(x), [-1])), [HEADS, -1]))


def beside(x):
    """A product sums the dims that both operands have."""
    both = tf.stack([tf.reshape(x, [-1]), tf.random.uniform([BATCH * HEADS])], 1)
    return tf.matmul(both, tf.ones([2, 1]))


FOLDED = {
    "examples first": (lambda x: noise(tf.reshape(x, [-1])), 1),
    "heads first": (heads_first, HEADS),
    "in a function": (lambda x: 1 * tf.function(heads_first, autograph=False)(x), HEADS),
    "in a loop": (
        lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, heads_first(h)), (0, x))[
            1
        ],
        HEADS,
    ),
    "in a branch": (
        lambda x: tf.cond(tf.size(x) > 0, lambda: heads_first(x), lambda: 2 * x),
        HEADS,
    ),
    "beside activations": (beside, 1),
    # Statistics of the whole batch are nobody's; what is divided by them keeps its example.
    "normalized": (lambda x: heads_first(x / tf.reduce_mean(x, 0, keepdims=True)), HEADS),
}


@pytest.mark.parametrize(("stage", "wanted"), FOLDED.values(), ids=FOLDED)
def test_the_order_of_folded_dims_is_found(stage, wanted):
    assert before(stage) == wanted


def test_the_order_of_all_dims_folded_into_one_is_found():
    def stage(x):
        return tf.reshape(x, [-1]) * tf.random.uniform([TIME * BATCH * WIDTH])

    assert before(stage, TIME * WIDTH, sizes=(TIME, BATCH, WIDTH), dim=1) == TIME


def test_inputs_belong_to_the_examples_along_the_dim_that_is_cut():
    one, two = labels_of_batch([tf.zeros([2, 3]), tf.zeros([5, 4, 1])], 1)
    assert one.tolist() == [[0, 1, 2]] and two.tolist() == [[[0], [1], [2], [3]]]


def test_without_folded_dims_the_graph_is_not_followed():
    draws, _ = draws_of(lambda x: x * tf.random.uniform([BATCH, 1]))
    (name,) = draws.whole.by_name
    assert draws.whole.before(name, 0, 1) == 1


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (lambda x: noise(tf.ones([BATCH * HEADS])), "no element that is known to belong"),
        (
            lambda x: tf.roll(tf.random.uniform([BATCH * HEADS]), 1, 0) * tf.reshape(x, [-1]),
            "no rule says what a Roll operation does with them",
        ),
        (
            lambda x: (lambda n: n * tf.reshape(x, [-1]) + n * tf.reshape(tf.transpose(x), [-1]))(
                tf.random.uniform([BATCH * HEADS])
            ),
            "in each order they meet",
        ),
    ],
    ids=["no example", "roll", "both"],
)
def test_an_order_that_cannot_be_found_is_an_error(stage, reason):
    with pytest.raises(
        PipelineError, match=rf"^layer 'layer' draws .*\(12,\).*{reason}.*separate dim"
    ):
        before(stage)


def test_outputs_have_the_labels_that_they_get_on_the_way():
    draws, graph = draws_of(lambda x: tf.transpose(x) + 1)
    (label,) = draws.labels(graph.outputs)
    np.testing.assert_array_equal(label, [np.arange(BATCH)])
