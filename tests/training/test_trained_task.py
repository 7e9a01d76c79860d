"""Updates of weights: all or none, with variables that exist before the first step."""

import collections
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import cluster_factory, learner, optimizer, py_utils

from pipemesh.training import all_or_none, prepare_optimizer
from pipemesh.training.trained_task import Squares, finite_gradients


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


class OwnLearner(learner.Learner):
    """May use all that lingvo's learner adds."""

    def ScaleGradients(self, var_grads, gradient_adjuster=None):
        return super().ScaleGradients(var_grads, gradient_adjuster)


CLIPPED = [
    {},
    {"clip_gradient_norm_to_value": 0.5},
    {"grad_norm_to_clip_to_zero": 0.5},
    {"clip_gradient_single_norm_to_value": 0.5},
]


@pytest.mark.parametrize("values", CLIPPED, ids=str)
def test_finite_gradients_are_scaled_as_by_lingvos_learner(values):
    rows = tf.IndexedSlices(tf.fill([2, 3], 0.5), tf.constant([4, 4]), tf.constant([9, 3]))
    pairs = py_utils.NestedMap(
        a=py_utils.VarGrad(tf.Variable([1.0, 2.0]), tf.constant([3.0, -4.0])),
        b=py_utils.VarGrad(tf.Variable(tf.zeros([9, 3])), rows),
    )

    def outcome(is_lean, adjust=lambda pairs: pairs):
        made = learner.Learner.Params().Set(name="loss", learning_rate=0.5, **values).Instantiate()
        squares = Squares()

        def adjusted(pairs):
            return all_or_none(adjust(pairs), squares=squares)

        is_adjusted = adjust(pairs) is not pairs
        lean = finite_gradients(made, squares, is_adjusted) if is_lean else nullcontext()
        with lean:
            scaled, stats = made.AdjustGradients(pairs, gradient_adjuster=adjusted)
        gradients = [tf.convert_to_tensor(g) for _, g in scaled.Flatten()]
        return [*gradients, *(stats[name][0] for name in ("grad_norm/all",) if name in stats)]

    def doubled(pairs):
        (a, grad), rest = pairs.a, {"b": pairs.b}
        return py_utils.NestedMap(a=py_utils.VarGrad(a, grad * 2), **rest)

    for given in ((), (doubled,)):
        for found, expected in zip(outcome(True, *given), outcome(False, *given), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_each_gradient_is_squared_once_and_scaled_once():
    def operations(cls, number):
        """The operations of a step with so many weights."""
        params = cls.Params().Set(name="loss", clip_gradient_norm_to_value=1.0, learning_rate=0.5)
        made, squares = params.Instantiate(), Squares()
        with tf.Graph().as_default() as graph:
            pairs = py_utils.NestedMap(
                {f"w{i}": py_utils.VarGrad(tf.ones([2]), tf.ones([2])) for i in range(number)}
            )
            before = len(graph.get_operations())
            with finite_gradients(made, squares):
                made.AdjustGradients(
                    pairs, gradient_adjuster=lambda p: all_or_none(p, squares=squares)
                )
        return [operation.type for operation in graph.get_operations()[before:]]

    def more(cls):
        two, three = (operations(cls, number) for number in (2, 3))
        return collections.Counter(three) - collections.Counter(two)

    assert more(learner.Learner) == {"L2Loss": 1, "Identity": 1, "Mul": 1}
    assert more(OwnLearner).total() > 10
    with cluster_factory.Cluster(cluster_factory.Current().params.Copy().Set(add_summary=True)):
        assert more(learner.Learner) == more(OwnLearner)
