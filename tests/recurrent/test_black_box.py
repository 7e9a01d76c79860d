"""What any pipeline must survive, seen from outside: one test a case."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ScheduleError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.schedule import Schedule, gpipe, one_f_one_b, zb_h1

WIDTH, BATCH = 3, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=[BATCH, WIDTH]).astype(np.float32)
WEIGHTS = RNG.normal(size=[4, WIDTH, WIDTH]).astype(np.float32)


class Model:
    """Layers over `(h, *others)`; one weight each; the last one gives each example's loss."""

    def __init__(self, layers, weights=WEIGHTS, inputs=(X,)):
        self.layers, self.inputs = layers, inputs
        self.variables = [tf.Variable(w) for w in weights]
        self.theta = [self.variables[min(i, len(weights) - 1)] for i in range(len(layers))]

    def apply(self, numbers, theta, tensors):
        for i, weight in zip(numbers, theta, strict=True):
            with layer_scope(f"layer{i}"):
                tensors = self.layers[i](weight, *tensors)
        return tensors

    def plain(self):
        with plan_free_randomness(tf.constant(0, tf.int64)):
            inputs = [tf.constant(x) for x in self.inputs]
            (each,) = self.apply(range(len(self.layers)), self.theta, inputs)
        return tf.reduce_sum(each)

    def pipelined(self, boundaries, schedule, **options):
        def make(s):
            numbers = range(boundaries[s], boundaries[s + 1])

            def forward(theta, carry, inputs, microbatch, step):
                outputs = self.apply(numbers, theta, inputs)
                last = s == len(boundaries) - 2
                return [tf.reduce_sum(outputs[0])] if last else list(outputs), []

            theta = [tf.convert_to_tensor(self.theta[i]) for i in numbers]
            return Stage(f"stage{s}", forward, theta, [], f"CPU:{schedule.stage_devices[s]}")

        loss, _, _ = pipeline_loss(
            [make(s) for s in range(len(boundaries) - 1)],
            [tf.constant(x) for x in self.inputs],
            schedule,
            step=tf.constant(0, tf.int64),
            options=Options(**options),
        )
        return loss

    def loss_and_grads(self, build):
        @tf.function(autograph=False)
        def run():
            with tf.GradientTape() as tape:
                loss = build()
            return loss, tape.gradient(loss, self.variables)

        loss, grads = run()
        return [loss.numpy(), *(grad.numpy() for grad in grads)]

    def assert_equal(self, boundaries, schedule, **options):
        want = self.loss_and_grads(self.plain)
        got = self.loss_and_grads(lambda: self.pipelined(boundaries, schedule, **options))
        for a, b in zip(got, want, strict=True):
            assert np.isfinite(b).all()
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        return got


def dense(weight, h, *others):
    return tf.nn.tanh(tf.matmul(h, weight)), *others


def squares(weight, h, *others):
    return (tf.reduce_sum(dense(weight, h)[0] ** 2, axis=1),)


def test_nan_in_idle_slots_changes_nothing():
    """Zeros, as a buffer has them before the first and after the last microbatch."""

    def normalized(weight, h):
        return (tf.matmul(h / tf.norm(h, axis=1, keepdims=True), weight),)

    assert np.isnan(normalized(WEIGHTS[0], tf.zeros([1, WIDTH]))[0]).all()
    model = Model([normalized, normalized, normalized, squares])
    model.assert_equal([0, 1, 2, 3, 4], zb_h1(4, 2))


def test_another_cut_changes_no_loss_and_no_gradients():
    def noisy(weight, h):
        return (tf.nn.dropout(dense(weight, h)[0], rate=0.3),)

    model = Model([noisy, noisy, noisy, squares])
    model.assert_equal([0, 1, 4], one_f_one_b(2, 4))


def test_the_sum_of_a_loss_scales_exactly_with_its_mean():
    def grads(divisor, schedule):
        model = Model([dense, dense, dense, squares])
        boundaries = [0, 2, 4]
        return model.loss_and_grads(lambda: model.pipelined(boundaries, schedule) / divisor)

    schedule = zb_h1(2, 4)
    for summed, mean in zip(grads(1, schedule), grads(BATCH, schedule), strict=True):
        np.testing.assert_array_equal(summed, BATCH * mean)


def test_a_tied_weight_has_one_gradient_and_one_entry(tmp_path):
    model = Model([dense, dense, squares], weights=WEIGHTS[:2])
    first, middle = model.variables
    model.theta = [first, middle, first]
    _, grad, _ = model.assert_equal([0, 1, 2, 3], one_f_one_b(3, 4))
    untied = Model([dense, dense, squares], weights=WEIGHTS[[0, 1, 0]])
    _, one, _, two = untied.loss_and_grads(lambda: untied.pipelined([0, 1, 2, 3], gpipe(3, 4)))
    np.testing.assert_allclose(grad, one + two, rtol=1e-5, atol=1e-5)
    path = tf.train.Checkpoint(layers=model.theta).save(str(tmp_path / "ckpt"))
    values = [n for n, _ in tf.train.list_variables(path) if n.endswith("VARIABLE_VALUE")]
    assert len(values) == 2 + 1, "two weights and the checkpoint's own counter of saves"


def test_skip_connections_and_auxiliary_outputs_cross_stages():
    """The first layer's result is used by the last; each layer adds to an auxiliary loss."""

    def start(weight, h, auxiliary):
        y = tf.matmul(h, weight)
        return y, auxiliary + tf.reduce_sum(y**2, axis=1), y

    def middle(weight, h, auxiliary, skip):
        y = tf.nn.tanh(tf.matmul(h, weight))
        return y, auxiliary + tf.reduce_sum(tf.abs(y), axis=1), skip

    def end(weight, h, auxiliary, skip):
        return (tf.reduce_sum((tf.matmul(h, weight) + skip) ** 2, axis=1) + 0.1 * auxiliary,)

    model = Model([start, middle, middle, end], inputs=(X, np.zeros(BATCH, np.float32)))
    model.assert_equal([0, 1, 2, 3, 4], zb_h1(4, 4), remat="none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0 0F1 0I0 0W0 0I1 0W1\n1I0 1W0 1F1 1I1 1W1",
            r"device 1 never does 1F0; it belongs nea",
        ),
        ("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1W0 1I0 1F1 1I1 1W1", r"device 1, tick 1: .*1W0"),
        ("0F0 1F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1", r"device \d, tick \d"),
    ],
    ids=["a missing F", "W before I", "a stage on two devices"],
)
def test_a_corrupted_table_is_rejected_by_device_and_tick(text, message):
    schedule = Schedule.from_text(text)
    model = Model([dense, squares], weights=WEIGHTS[:2])
    with pytest.raises(ScheduleError, match=message):
        model.loss_and_grads(lambda: model.pipelined([0, 1, 2], schedule))
