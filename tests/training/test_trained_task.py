"""Updates of weights: all or none, with variables that exist before the first step."""

import tensorflow as tf
from lingvo.core import cluster_factory, learner, optimizer, py_utils

from pipemesh.training import all_or_none, prepare_optimizer
from pipemesh.training.trained_task import only_kept_norms


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


def test_norms_of_single_weights_are_computed_for_summaries_alone():
    class Own(learner.Learner):
        def ScaleGradients(self, var_grads, gradient_adjuster=None):
            return super().ScaleGradients(var_grads, gradient_adjuster)

    def counts(cls):
        """The operations of a step with one weight, and with two."""
        params = cls.Params().Set(name="loss", optimizer=optimizer.SGD.Params(), learning_rate=0.5)
        made = params.Instantiate()
        for number in (1, 2):
            with tf.Graph().as_default() as graph, only_kept_norms(made):
                pairs = py_utils.NestedMap(
                    {f"w{i}": py_utils.VarGrad(tf.ones([2]), tf.ones([2])) for i in range(number)}
                )
                made.AdjustGradients(pairs)
            yield sum("TransformAndSum" in operation.name for operation in graph.get_operations())

    lingvos, own = ([*counts(cls)] for cls in (learner.Learner, Own))
    one, two = (a - b for a, b in zip(own, lingvos, strict=True))
    assert two == 2 * one > 0
    with cluster_factory.Cluster(cluster_factory.Current().params.Copy().Set(add_summary=True)):
        assert [*counts(learner.Learner)] == own
