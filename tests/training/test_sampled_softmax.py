"""Sampled softmax in a stage trains alike under every plan."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.training import Options, Trainer
from pipemesh.training.registered import RegisteredModel
from tests.training import small_models

CLASSES = 40


class SampledHead(small_models.Head):
    """The loss of classes that stand in the labels, by eight candidates."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        init = py_utils.WeightInit.Gaussian(0.1)
        self.CreateVariable("w", py_utils.WeightParams([CLASSES, 1], init, tf.float32))
        self.CreateVariable("b", py_utils.WeightParams([CLASSES], init, tf.float32))

    def FProp(self, theta, x, y):
        classes = tf.cast(y * 7, tf.int64)
        losses = tf.nn.sampled_softmax_loss(theta.w, theta.b, classes, x, 8, CLASSES)
        return tf.reduce_sum(losses), tf.cast(tf.shape(x)[0], tf.float32)


class Model(small_models.PlannedPoints):
    def Task(self):
        p = super().Task()
        last = p.stack.cell_tpl[-1]
        last.sub[-1] = SampledHead.Params().Set(name=last.sub[-1].name)
        return p


@pytest.mark.slow
def test_each_microbatch_has_the_candidates_of_the_whole_batch(eagerly, tmp_path):
    losses = []
    for mesh, more in (("layers:1", {}), ("layers:2", {"num_microbatches": "4"})):
        model = RegisteredModel(Model(), "Points", {"mesh": mesh, **more}, plain=not more)
        (tmp_path / mesh).mkdir()
        options = Options(logdir=str(tmp_path / mesh), steps=9)
        trainer = Trainer(model, options, None, keeps_place=True)
        losses.append([trainer.train_step()["loss"] for _ in range(2)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
