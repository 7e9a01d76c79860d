"""Sampled softmax, in a stage and outside, trains alike under every plan and goes on."""

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


class Outside(small_models.Pipelined):
    """Computes its loss outside of the stack."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("head", SampledHead.Params())

    def ComputePredictions(self, theta, input_batch):
        x = self.stack.FProp(theta.stack, input_batch.x, input_batch.y)[0]
        return self.head.FProp(theta.head, x, input_batch.y)


class Model(small_models.PlannedPoints):
    INSIDE = True

    def Task(self):
        p = super().Task()
        last = p.stack.cell_tpl[-1]
        head = last.sub[-1]
        assert issubclass(head.cls, small_models.Head)
        if self.INSIDE:
            last.sub[-1] = SampledHead.Params().Set(name=head.name)
        else:
            last.sub = last.sub[:-1]
            p.stack.loss_inside = False
            p.cls = Outside
        return p


class OutsideModel(Model):
    INSIDE = False


def trainer(config, logdir, restore=None, **values):
    logdir.mkdir(exist_ok=True)
    subject = RegisteredModel(config(), "Points", values, plain=values == {"mesh": "layers:1"})
    options = Options(logdir=str(logdir), steps=9)
    return Trainer(subject, options, restore, keeps_place=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [Model, pytest.param(OutsideModel, marks=pytest.mark.exhaustive)]
)
def test_sampled_softmax_is_equal_under_plans_and_resumes(eagerly, tmp_path, config):
    plain = trainer(config, tmp_path / "plain", mesh="layers:1")
    wanted = [plain.train_step()["loss"] for _ in range(2)]
    path = plain.save()
    wanted += [plain.train_step()["loss"] for _ in range(2)]
    again = trainer(config, tmp_path / "again", path, mesh="layers:1")
    assert [again.train_step()["loss"] for _ in range(2)] == wanted[2:]
    values = {"mesh": "layers:2", "num_microbatches": "4"}
    if config is OutsideModel:
        values["schedule"] = "gpipe"
    planned = trainer(config, tmp_path / "planned", **values)
    found = [planned.train_step()["loss"] for _ in range(4)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
