"""Causal attention and a recurrence, plain and cut into stages that get slices of sequences."""

import dataclasses

import numpy as np
import tensorflow as tf

from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import Options, Stage, current_slice, pipeline, pipeline_loss, write_slice
from pipemesh.schedule import Schedule, validate
from tests.devices import device_name
from tests.recurrent import gradients

BATCH, TIME, WIDTH, HEADS, LAYERS = 8, 8, 6, 2, 3
DEPTH = WIDTH // HEADS
RNG = np.random.default_rng(0)
STEP = tf.constant(5, tf.int64)
X = RNG.normal(size=[BATCH, TIME, WIDTH]).astype(np.float32)
LABELS = RNG.normal(size=[BATCH, TIME, WIDTH]).astype(np.float32)
# One for each example: no sequence.
SCALES = RNG.uniform(1, 2, size=[BATCH]).astype(np.float32)
VALUES = {
    "into": RNG.normal(size=[LAYERS, WIDTH, 3, HEADS, DEPTH]).astype(np.float32),
    "out": RNG.normal(size=[LAYERS, HEADS, DEPTH, WIDTH]).astype(np.float32) / 2,
    "hidden": RNG.normal(size=[LAYERS, WIDTH, WIDTH]).astype(np.float32) / 2,
    "positions": RNG.normal(size=[TIME, WIDTH]).astype(np.float32),
}


def sliced(schedule, num_slices):
    """A schedule of which each action is one for each slice, one after the other."""
    rows = []
    for row in schedule.rows:
        rows.append([])
        for action in row:
            order = range(num_slices)
            for q in order if action.kind in "FR" else reversed(order):
                rows[-1].append(dataclasses.replace(action, slice=q))
    homes = schedule.stage_devices
    return validate(Schedule(rows, homes, schedule.num_microbatches, num_slices))


def attention(weights, x, past, first):
    """Queries attend to all keys up to their own position; also gives keys and values."""
    query, key, value = tf.unstack(tf.einsum("btd,dnhk->nbhtk", x, weights["into"]))
    if past is None:
        keys, values = key, value
    else:
        keys, values = write_slice(past[0], key, 2), write_slice(past[1], value, 2)
    time = x.shape[1]
    scores = tf.einsum("bhqk,bhtk->bhqt", query, keys) / DEPTH**0.5
    own = tf.cast(first, tf.int64) + tf.range(time, dtype=tf.int64)
    seen = tf.range(keys.shape[2], dtype=tf.int64)[None] <= own[:, None]
    chances = tf.nn.softmax(tf.where(seen, scores, -1e9))
    # Dropped where the numbers have heads and both times.
    chances = tf.nn.dropout(chances, 0.3)
    mixed = tf.einsum("bhqt,bhtk->bqhk", chances, values)
    return tf.einsum("bthk,hkd->btd", mixed, weights["out"]), [keys, values]


def layer(number, weights, x, past=None, first=0):
    with layer_scope(f"layer{number}"):
        mixed, past = attention(weights, x, past, first)
        x = x + mixed
        h = tf.nn.tanh(tf.matmul(x, weights["hidden"]))
        return x + tf.nn.dropout(h, 0.25), past


def placed(table, x, first):
    return x + tf.slice(table, [first, 0], [x.shape[1], WIDTH])


def head(x, labels, scales):
    """The summed loss, how many numbers there are, what every position contributes."""
    each = tf.reduce_sum((x - labels) ** 2, -1) * scales[:, None]
    return [tf.reduce_sum(each), tf.cast(tf.size(each), tf.float32), each]


def of_layer(weights, number):
    return {name: weights[name][number] for name in ("into", "out", "hidden")}


def plain(weights, x, labels, scales):
    with plan_free_randomness(STEP):
        x = placed(weights["positions"], x, 0)
        for number in range(LAYERS):
            x, _ = layer(number, of_layer(weights, number), x)
        return [*head(x, labels, scales), x]


def stages(weights, schedule, has_loss):
    """As many as the schedule has; the last ones have most layers."""
    cuts = [LAYERS * s // schedule.num_stages for s in range(schedule.num_stages + 1)]
    rows = BATCH // schedule.num_microbatches

    def make(number):
        layers = range(cuts[number], cuts[number + 1])

        def forward(theta, carry, inputs, microbatch, step):
            x, *rest = inputs
            piece = current_slice()
            first = piece.begin(x.shape[1])
            if number == 0:
                x = placed(theta[-1], x, first)
            handed_on = []
            for i, index in enumerate(layers):
                own = dict(zip(("into", "out", "hidden"), theta[3 * i :], strict=False))
                x, past = layer(index, own, x, carry[2 * i : 2 * i + 2], first)
                handed_on += past
            if number == schedule.num_stages - 1:
                return (head(x, *rest) if has_loss else [x]), handed_on
            return [x, *rest], handed_on

        own = [w for i in layers for w in of_layer(weights, i).values()]
        past = tf.zeros([rows, HEADS, TIME, DEPTH])
        return Stage(
            f"stage{number}",
            forward,
            own + [weights["positions"]] * (number == 0),
            [past] * (2 * len(layers)),
            device_name(schedule.stage_devices[number]),
            recurrent=True,
            takes_slices=True,
        )

    return [make(number) for number in range(schedule.num_stages)]


def pipelined(weights, x, labels, scales, schedule, **options):
    options = Options(**options)
    made = stages(weights, schedule, True)
    inputs = [x, labels, scales]
    loss, (counts, each), carries = pipeline_loss(
        made, inputs, schedule, step=STEP, options=options
    )
    assert carries == [[]] * len(made)
    assert counts.shape == [schedule.num_pieces]
    return [loss, tf.reduce_sum(counts), each]


def pipelined_outputs(weights, x, schedule, **options):
    made = stages(weights, schedule, False)
    (y,), _ = pipeline(made, [x], schedule, step=STEP, options=Options(**options))
    return [y]


def with_gradients(build, *inputs):
    """Results for weights and inputs, and the gradients of all of them."""

    def of_tensors(*tensors):
        weights = {
            name: tensor if name == "positions" else tf.unstack(tensor)
            for name, tensor in zip(VALUES, tensors, strict=False)
        }
        return build(weights, *tensors[len(VALUES) :])

    return gradients.with_gradients(of_tensors, *VALUES.values(), *inputs)


def assert_same(got, want):
    gradients.assert_same(got, want, tolerance=2e-4)
