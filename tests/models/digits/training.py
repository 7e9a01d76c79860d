"""A training of a registered model in a few lines, as a trainer does it."""

import itertools

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers import mesh_cluster
from pipemesh.mesh import Mesh
from pipemesh.training import all_or_none, prepare_optimizer


class Training:
    """Steps and evaluations of a task, in lingvo's eager mode."""

    def __init__(self, task_params, mesh="layers:1"):
        self._mesh = Mesh.from_text(mesh)
        tf.random.set_seed(0)
        with mesh_cluster(self._mesh):
            self.step = py_utils.GetOrCreateGlobalStepVar()
            self.step.assign(0)
            self.task = task_params.Instantiate()
        (learner,) = self.task.learners
        prepare_optimizer(learner, self.task.vars.Flatten(), self.step)
        self._train = tf.function(self._train_step, autograph=False)
        self._evaluate = tf.function(self._metrics, autograph=False)

    def _metrics(self, batch):
        return dict(self.task.FPropTower(self.task.theta, batch)[0])

    def _train_step(self, batch):
        with py_utils.GradientTape(), py_utils.GlobalStepContext(self.step):
            metrics = self._metrics(batch)
            _, update, _ = self.task.learners[0].Apply(
                metrics, self.task.vars, gradient_adjuster=all_or_none
            )
        with tf.control_dependencies([update]):
            after = self.task.PostTrainingStepUpdate()
        with tf.control_dependencies([after]):
            self.step.assign_add(1)
        return metrics

    def train(self, batches, steps=None):
        """Trains on batches; returns the losses."""
        losses = []
        for batch in itertools.islice(batches, steps):
            with mesh_cluster(self._mesh):
                losses.append(float(self._train(batch)["loss"][0]))
        return losses

    def evaluate(self, batches):
        """The means of all metrics over batches, and the sum of weights of the loss."""
        sums, weights = {}, {}
        for batch in batches:
            with mesh_cluster(self._mesh, do_eval=True):
                metrics = self._evaluate(batch)
            for name, (value, weight) in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value) * float(weight)
                weights[name] = weights.get(name, 0.0) + float(weight)
        return {name: sums[name] / weights[name] for name in sums}, weights["loss"]

    def weights(self):
        """All variables, by name."""
        return {v.name: v.numpy() for v in self.task.vars.Flatten()}


def batches_of(params):
    """The dataset of an input generator's params."""
    return params.Instantiate().datasource.GetDataset()


def assert_same_weights(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], err_msg=name, **tolerance)
