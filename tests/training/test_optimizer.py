"""The optimizer's variables are there before the first step."""

import tensorflow as tf
from lingvo.core import learner, optimizer, py_utils

from pipemesh.training import prepare_optimizer


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
