"""Options that contradict themselves are errors when they are made."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from pipemesh import recurrent
from pipemesh.errors import PipelineError
from pipemesh.recurrent import LossScale, Options, Stage, pipeline, pipeline_loss
from pipemesh.recurrent.table.run import LOOP_ABOVE, LOOP_LARGE_ACTIONS_ABOVE
from pipemesh.recurrent.watch.finite_values import CHECKS
from pipemesh.schedule import gpipe, one_f_one_b
from tests.recurrent.stack import RUNNERS, pipelined, plain


def test_texts_say_from_which_size_on_there_is_a_loop():
    readme = pathlib.Path(recurrent.__file__).with_name("README.md").read_text(encoding="utf-8")
    for text in (str(Options.__doc__), readme):
        for nodes in (LOOP_ABOVE, LOOP_LARGE_ACTIONS_ABOVE):
            assert f"more than {nodes:,}" in " ".join(text.split())


def test_wrong_values_of_loop_are_errors():
    with pytest.raises(PipelineError, match=r"loop='ticks' is invalid\. Use True, False, or None"):
        Options(loop="ticks")


def test_a_loss_scale_excludes_a_check_of_gradients():
    loss_scale = LossScale(tf.constant(8.0), tf.constant(0), tf.constant(True))
    assert Options().check_numerics == "results"
    assert Options(loss_scale=loss_scale).check_numerics == "loss"
    for policy in CHECKS:
        assert Options(check_numerics=policy).check_numerics == policy
        if policy not in ("all", "results"):
            assert Options(check_numerics=policy, loss_scale=loss_scale).check_numerics == policy
            continue
        with pytest.raises(PipelineError, match=f"check_numerics is '{policy}', but a loss_scale"):
            Options(check_numerics=policy, loss_scale=loss_scale)
    # A copy has the policy that was found for the first one.
    with pytest.raises(PipelineError, match="check_numerics is 'results', but a loss_scale"):
        dataclasses.replace(Options(), loss_scale=loss_scale)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().batch_dim = 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"check_numerics": "some"}, "check_numerics is 'some'; allowed are all, forward"),
        ({"remat": "some"}, "remat is 'some'; allowed are full, none, except_last"),
        ({"compute_dtype": "int32"}, "int32"),
        ({"compute_dtype": tf.float64}, "float64"),
        ({"loop": "ticks"}, r"loop='ticks' is invalid\. Use True, False, or None"),
    ],
)
def test_what_there_is_not_is_an_error_that_names_it(given, text):
    with pytest.raises(PipelineError, match=text):
        Options(**given)


TOLERANCE = {"bfloat16": 2e-2, "float16": 6e-3}


@pytest.mark.parametrize(("mode", "dtype"), [("tf1", "float16"), ("tf2", "bfloat16")])
def test_the_result_is_that_of_the_plain_model_in_that_precision(mode, dtype):
    """Dropout on: the masks of few bits are the same ones."""
    run = RUNNERS[mode]
    wanted = run(lambda theta: plain(theta, dtype), num_steps=1)
    got = run(lambda theta: pipelined(theta, one_f_one_b(2, 4), compute_dtype=dtype), num_steps=1)
    for a, b in zip([got[0], *got[2]], [wanted[0], *wanted[2]], strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype] * np.abs(b).max())


def scale(theta, carry, inputs, microbatch, step):
    return [inputs[0] * theta[0]], []


def summed(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(inputs[0] * theta[0])], []


def gradient_of(weight, x, num_microbatches, forwards=(summed,), **options):
    """The gradient of a weight that all stages have."""
    with tf.GradientTape() as tape:
        theta = [tf.convert_to_tensor(weight)]
        stages = [Stage(f"s{i}", f, theta, [], f"CPU:{i}") for i, f in enumerate(forwards)]
        schedule = one_f_one_b(len(stages), num_microbatches)
        loss, _, _ = pipeline_loss(stages, [x], schedule, options=Options(**options))
    return tape.gradient(loss, weight)


def test_gradients_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256: a sum of ones would stop there."""
    weight = tf.Variable(1.0)

    @tf.function
    def run(x):
        return gradient_of(weight, x, 300, compute_dtype="bfloat16", loop=True)

    gradient = run(tf.ones([300]))
    assert gradient.dtype == tf.float32
    assert float(gradient) == 300


def tiny_gradient(loss_scale, inside):
    weight, x = tf.Variable(1.0), tf.ones([4])

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            stages = [
                Stage(f"s{i}", function, [tf.convert_to_tensor(w)], [], f"CPU:{i}")
                for i, (function, w) in enumerate([(scale, weight), (scale, 1e-4), (scale, 1e-4)])
            ]
            options = Options(compute_dtype="float16", loss_scale=loss_scale)
            if inside:
                stages[2] = Stage("s2", summed, [tf.constant(1e-4)], [], "CPU:2")
                loss, _, _ = pipeline_loss(stages, [x], one_f_one_b(3, 2), options=options)
            else:
                (y,), _ = pipeline(stages, [x], gpipe(3, 2), options=options)
                loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return tape.gradient(loss, [weight, x])

    return [t.numpy() for t in run()]


@pytest.mark.parametrize("inside", [True, False])
def test_loss_scaling_saves_gradients_that_vanish_in_float16(inside):
    without, _ = tiny_gradient(None, inside)
    weight, x = tiny_gradient(LossScale.create(), inside)
    assert abs(without - 4e-8) > 1e-8
    np.testing.assert_allclose(weight, 4e-8, rtol=1e-2)
    np.testing.assert_allclose(x, np.full(4, 1e-8), rtol=1e-2)


def test_an_overflow_changes_no_weight_and_halves_the_scale():
    weight, scale_of_loss = tf.Variable(1.0), LossScale.create()

    @tf.function
    def step(x):
        gradient = gradient_of(weight, x, 2, compute_dtype="float16", loss_scale=scale_of_loss)
        return gradient, scale_of_loss.when_finite(lambda: weight.assign_sub(gradient))

    seen = []
    for _ in range(6):
        before = float(weight)
        gradient, applied = step(tf.fill([4], 8.0))
        seen.append((float(scale_of_loss.value), bool(applied)))
        assert float(weight) == before - float(gradient)
        assert (float(gradient) != 0) == bool(applied)
    # 16 * 32,768 and 16 * 4,096 are beyond float16, 16 * 2,048 is not.
    assert seen[:4] == [(16384.0, False), (8192.0, False), (4096.0, False), (2048.0, False)]
    assert seen[4:] == [(2048.0, True)] * 2
    assert float(gradient) == 32.0


def test_checks_inside_of_a_stage_let_scaled_gradients_overflow():
    """lingvo's layers have such checks, which ended each step: the scale was never halved."""

    def checked(theta, carry, inputs, microbatch, step):
        return [tf.debugging.check_numerics(inputs[0] * theta[0], "product")], carry

    weight, scale_of_loss = tf.Variable(1.0), LossScale.create()

    @tf.function
    def gradient(x):
        options = {"compute_dtype": "float16", "loss_scale": scale_of_loss}
        return gradient_of(weight, x, 2, (checked, summed), **options)

    assert float(gradient(tf.fill([4], 8.0))) == 0.0 and float(scale_of_loss.value) == 2.0**14
    with pytest.raises(tf.errors.InvalidArgumentError, match="product"):
        gradient(tf.fill([4], float("inf")))


def test_the_scale_doubles_after_many_good_steps():
    scale_of_loss = LossScale.create()
    scale_of_loss.variables[1].assign(1998)
    values = []
    for _ in range(3):
        scale_of_loss.checked([[tf.constant(1.0)]])
        values.append(float(scale_of_loss.value))
    assert values == [2.0**15, 2.0**16, 2.0**16]


def test_a_tf1_graph_updates_the_scale_with_every_gradient():
    with tf.Graph().as_default():
        names = {"loss_scale": 2.0**15, "good_steps": np.int64(0), "finite": True}
        variables = [
            tf.compat.v1.get_variable(n, initializer=v, trainable=False, use_resource=True)
            for n, v in names.items()
        ]
        weight = tf.compat.v1.get_variable("w", initializer=3.0, use_resource=True)
        stages = [Stage("s", summed, [tf.convert_to_tensor(weight)], [], "CPU:0")]
        options = Options(compute_dtype="float16", loss_scale=LossScale(*variables))
        x = tf.compat.v1.placeholder(tf.float32, [4])
        loss, _, _ = pipeline_loss(stages, [x], one_f_one_b(1, 2), options=options)
        # As lingvo's trainer takes it.
        (gradient,) = tf.compat.v1.gradients(loss, [weight])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(gradient, {x: [1.0] * 4}) == 0.0
            assert session.run(variables) == [2.0**14, 0, False]
            assert session.run(gradient, {x: [0.5] * 4}) == 2.0
            assert session.run(variables) == [2.0**14, 1, True]


def test_each_gradient_is_checked_and_kept_on_its_own_device():
    devices = [d.name for d in tf.config.list_logical_devices("CPU")][:2]
    loss_scale = LossScale.create()

    @tf.function(autograph=False)
    def run(x):
        grads = []
        for device in devices:
            with tf.device(device):
                grads.append(tf.sin(x))
        return loss_scale.checked([grads])

    operations = run.get_concrete_function(tf.TensorSpec([4])).graph.get_operations()
    for kind in ("IsFinite", "SelectV2"):
        found = [op.device for op in operations if op.type == kind and op.outputs[0].shape.rank]
        assert found == devices, kind
