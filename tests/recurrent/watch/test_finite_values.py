"""What is not finite ends the step, is named, and changes no variable."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Options, Stage, pipeline, pipeline_loss
from pipemesh.schedule import forward_only, gpipe, one_f_one_b
from tests.recurrent.passes.traced import traced_stage
from tests.recurrent.poisoned import MODES, explained, nothing, poison


def everything(name):
    return True


def probes_of(**given):
    with tf.Graph().as_default():
        traced = traced_stage(**given)
    return traced, traced.replicas[0].probes


def test_outputs_of_no_layer_are_looked_at_without_blame():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(inputs[0], theta[0]), inputs[0], tf.shape(inputs[0])], carry

    _, probes = probes_of(forward=forward)
    (probe,) = probes.forward(everything)
    assert probe.layers == () and len(probe.tensors) == 1 and "MatMul" in probe.tensors[0]


def test_the_first_stage_is_checked_where_weights_meet_data():
    _, probes = probes_of()
    names = [f"g{i}" for i in range(len(probes.sources))]
    probes.gradients, probes.of_inputs = names, ["input"]
    found = probes.backward(True, everything)
    assert found[-1].layers == ("first",) and "input" not in found[-1].tensors
    assert [name for probe in found for name in probe.tensors] == names
    assert "MatMul" in probes.sources[-1].name


ALL = Options(check_numerics="all")


@pytest.fixture(scope="module", params=MODES)
def training(request):
    """One graph a mode: what is poisoned is fed."""
    return MODES[request.param](remat="none")


@pytest.mark.parametrize(
    ("layer", "microbatch", "direction"),
    [(0, 2, "forward"), (1, 0, "backward"), (2, 3, "forward"), (5, 1, "backward")],
)
def test_stage_layer_and_microbatch_of_a_nan_are_named(training, layer, microbatch, direction):
    training.step(nothing())
    before = training.values()
    stage = layer // 2
    what = "its output" if direction == "forward" else "a gradient"
    assert explained(training.step, poison(layer, microbatch, direction)) == (
        f"stage 'stage{stage}' (CPU:{stage}), layer 'layer{layer}', microbatch {microbatch}, "
        f"{direction}: {what} is not finite (NaN or infinite)"
    )
    for old, new in zip(before, training.values(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert np.isfinite(training.step(nothing())), "training can go on"


def test_the_cause_is_named_and_not_its_effects(training):
    where = poison(4, 1, "forward") | poison(3, 2, "forward") | poison(0, 0, "backward")
    assert "layer 'layer3', microbatch 2, forward" in explained(training.step, where)


def test_gradients_can_be_left_to_whoever_scales_the_loss():
    training = MODES["tf2"](schedule=gpipe(3, 4), check_numerics="forward")
    training.step(poison(2, 1, "backward"))
    assert np.isnan(training.values()[0]).any()
    with pytest.raises(tf.errors.InvalidArgumentError, match="forward: its output is not finite"):
        training.step(poison(2, 1, "forward"))


def test_by_default_the_step_fails_without_saying_where_it_began():
    training = MODES["tf2"](schedule=one_f_one_b(3, 4), check_numerics=None)
    before = training.values()
    for direction, message in [
        ("forward", "stage 'stage2' (CPU:2), forward: the loss is not finite"),
        ("backward", "backward: a gradient of shape"),
    ]:
        found = explained(training.step, poison(2, 1, direction))
        assert message in found
        assert "microbatch 1" not in found
        for old, new in zip(before, training.values(), strict=True):
            np.testing.assert_array_equal(old, new)


def test_nothing_is_checked_where_nobody_wants_it():
    training = MODES["tf2"](schedule=gpipe(3, 4), check_numerics="off")
    assert np.isnan(training.step(poison(2, 1, "forward")))


def one_stage(function, theta, num_outputs=1):
    def forward(theta, carry, inputs, microbatch, step):
        with layer_scope("only"):
            return function(theta, *inputs), []

    return Stage("stage", forward, theta, [], "CPU:0")


def test_outputs_are_checked_while_the_loss_is_outside():
    @tf.function(autograph=False)
    def run(x):
        stage = one_stage(lambda _, x: [tf.math.log(x)], [])
        return pipeline([stage], [x], forward_only(1, 4), options=ALL)[0][0]

    run(tf.ones([4]))
    found = explained(run, tf.constant([1.0, 1.0, -1.0, 1.0]))
    assert "layer 'only', microbatch 2, forward: its output" in found


def test_a_weight_whose_gradient_alone_is_infinite_is_named():
    weight = tf.Variable([0.0, 1.0])

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            theta = [tf.convert_to_tensor(weight)]
            first = one_stage(lambda _, x: [x], [])
            second = one_stage(
                lambda w, x: [tf.reduce_sum(x + tf.stop_gradient(x) * tf.sqrt(w[0]))], theta
            )
            loss, _, _ = pipeline_loss([first, second], [x], one_f_one_b(2, 2), options=ALL)
        return tape.gradient(loss, weight)

    assert explained(run, tf.ones([4, 2])) == (
        "stage 'stage' (CPU:0), layer 'only', backward: a gradient of shape (2,), summed over the "
        "microbatches, is not finite (NaN or infinite)"
    )


@pytest.mark.parametrize("asked", [True, False])
def test_the_gradient_of_the_inputs_counts_if_it_is_asked_for(asked):
    weight, x = tf.Variable(2.0), tf.Variable([1.0, 1.0, 0.0, 1.0])

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            # The root of 0 is finite, its slope is not; the weight's gradient knows only the root.
            stage = one_stage(
                lambda w, x: [tf.reduce_sum(w[0] * tf.sqrt(x))], [tf.convert_to_tensor(weight)]
            )
            inputs = tf.identity(x) if asked else tf.constant(x.numpy_value)
            loss, _, _ = pipeline_loss([stage], [inputs], one_f_one_b(1, 4), options=ALL)
        grad_w, grad_x = tape.gradient(loss, [weight, x])
        weight.assign_sub(grad_w)
        return grad_x

    x.numpy_value = x.numpy()
    if not asked:
        assert step() is None
        assert float(weight) == 2 - 3
        return
    text = "'only', microbatch 2, backward: the gradient of input 0 is"
    assert text in explained(step)
    assert float(weight) == 2.0, "the weights wait for the gradient of the inputs, too"


def test_an_infinite_metric_changes_nothing():
    weight = tf.Variable(1.0)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:

            def head(theta, x):
                return [tf.reduce_sum(theta[0] * x), tf.math.log(theta[0] * x)]

            stage = one_stage(head, [tf.convert_to_tensor(weight)])
            loss, (metric,), _ = pipeline_loss([stage], [x], one_f_one_b(1, 2))
        return loss, metric, tape.gradient(loss, weight)

    loss, metric, grad = run(tf.constant([0.0, 1.0, 2.0, 3.0]))
    assert np.isinf(metric[0])
    assert (float(loss), float(grad)) == (6.0, 6.0)
