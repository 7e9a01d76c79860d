"""TF1's optimizers, which make their variables late."""

import numpy as np
import tensorflow as tf

from pipemesh.backend.optimizers import create_slots


def test_an_optimizers_variables_are_there_before_the_first_gradient():
    train = tf.compat.v1.train
    with tf.Graph().as_default():
        variables = [tf.Variable([1.0, 2.0], name=name) for name in "ab"]
        optimizer = train.MomentumOptimizer(0.1, 0.9)
        create_slots(optimizer, variables[:1])
        (slot,) = optimizer.variables()
        assert optimizer.get_slot(variables[0], "momentum") is slot
        assert slot in tf.compat.v1.global_variables()
        step = optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variables[0])])
        assert optimizer.variables() == [slot], "applying makes no second one"
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            np.testing.assert_array_equal(session.run(slot), [0, 0])
            session.run(step)
            np.testing.assert_array_equal(session.run(slot), [1, 1])
