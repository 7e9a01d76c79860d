"""Updates of weights: all or none, with variables that exist before the first step."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import learner, optimizer, py_utils

from pipemesh.training import all_or_none, prepare_optimizer
from pipemesh.training.trained_task import NOT_FINITE


def test_a_step_makes_no_variables(eagerly):
    params = learner.Learner.Params().Set(
        name="loss", optimizer=optimizer.Adam.ParamsB(), learning_rate=0.5
    )
    step, w = tf.Variable(0, dtype=tf.int64), tf.Variable([1.0, 2.0], name="w/var")
    made = params.Instantiate()
    prepare_optimizer(made, [w], step)
    before = made.optimizer._optimizer.variables()
    assert {tuple(v.shape) for v in before} == {(), (2,)}

    @tf.function
    def train():
        with py_utils.GlobalStepContext(step):
            gradients = py_utils.NestedMap(w=py_utils.VarGrad(w, tf.constant([1.0, -1.0])))
            made.optimizer.Apply(made.LearningRate, gradients)

    train()
    assert {v.ref() for v in made.optimizer._optimizer.variables()} == {v.ref() for v in before}
    assert w.numpy()[0] < 1 and w.numpy()[1] > 2


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_all_weights_move_or_none(clip):
    """Adam moved the others along gradients of earlier steps, now and then."""
    params = learner.Learner.Params().Set(
        name="loss",
        optimizer=optimizer.Adam.ParamsB(),
        learning_rate=0.5,
        clip_gradient_norm_to_value=clip,
    )
    step = tf.Variable(0, dtype=tf.int64)
    weights = py_utils.NestedMap()
    for number in range(8):
        with tf.device(f"CPU:{number % 4}"):
            weights[f"w{number}"] = tf.Variable(tf.ones([64, 64]), name=f"w{number}/var")
    made = params.Instantiate()
    prepare_optimizer(made, weights.Flatten(), step)

    @tf.function
    def train(factor):
        with py_utils.GradientTape(), py_utils.GlobalStepContext(step):
            loss = tf.add_n([tf.reduce_sum(w) for w in weights.Flatten()[:-1]])
            loss += factor * tf.reduce_sum(weights.w7)
            metrics = py_utils.NestedMap(loss=(loss, tf.constant(1.0)))
            made.Apply(metrics, weights, gradient_adjuster=all_or_none)

    train(tf.constant(1.0))
    variables = [*weights.Flatten(), *made.optimizer._optimizer.variables()]
    before = [v.numpy() for v in variables]
    assert (before[0] < 1).all()
    for bad in (np.nan, np.inf, 1e30) * 2:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{NOT_FINITE}|not finite"):
            train(tf.constant(bad, tf.float32))
        for variable, value in zip(variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
    train(tf.constant(1.0))
    assert (weights.w0.numpy() < before[0]).all()


def test_gradients_of_rows_stay_those():
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 4]), tf.constant([9, 3]))
    pairs = py_utils.NestedMap(w=py_utils.VarGrad(tf.Variable(tf.zeros([9, 3])), slices))
    found = all_or_none(pairs).w.grad
    assert isinstance(found, tf.IndexedSlices)
    assert found.indices.numpy().tolist() == [4, 4]
