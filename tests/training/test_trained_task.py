"""Updates of weights: all or none, with variables that exist before the first step."""

import tensorflow as tf
from lingvo.core import learner, optimizer, py_utils

from pipemesh.training import all_or_none, prepare_optimizer


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


def test_gradients_of_rows_stay_those():
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 4]), tf.constant([9, 3]))
    pairs = py_utils.NestedMap(w=py_utils.VarGrad(tf.Variable(tf.zeros([9, 3])), slices))
    found = all_or_none(pairs).w.grad
    assert isinstance(found, tf.IndexedSlices)
    assert found.indices.numpy().tolist() == [4, 4]
