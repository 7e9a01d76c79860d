"""Two families of models, whose layers are cut as plans say."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import base_model, base_model_params, learner, optimizer, schedule

from models.one_billion_word.params import OneBillionWordTiny
from pipemesh.layers import DatasetInput, PipeliningLayer, named
from pipemesh.layers.partition_layers import named_layers, stage_params
from pipemesh.partition import Partition
from pipemesh.plan import Plan

WIDTH, HIDDEN, LENGTH, CLASSES, BLOCKS, ROWS = 256, 1024, 16, 64, 6, 32


class Language(OneBillionWordTiny):
    """A small language model: an embedding, two Transformer blocks, a softmax."""

    NUM_LAYERS = 2
    SEQUENCE_LENGTH = 64


class Block(named.FeedForward):
    """Two products with a residual connection, in a stack that hands labels on."""

    def FProp(self, theta: Any, x: Any, labels: Any) -> Any:
        x = self.Named(x, "batch;length;embed")
        return x + super().FProp(theta, x), labels

    @classmethod
    def CountCosts(cls, p: Any, tally: Any, x: Any, labels: Any) -> Any:
        result = super().CountCosts(p, tally, x)
        tally.elementwise(result, result)
        return result, tally.given(labels, "batch;length", tf.int32)


class Head(named.SoftmaxCrossEntropy):
    """The summed cross entropy, and how many labels there are."""

    def FProp(self, theta: Any, x: Any, labels: Any) -> Any:
        return super().FProp(theta, x, labels)[:2]

    @classmethod
    def CountCosts(cls, p: Any, tally: Any, x: Any, labels: Any) -> Any:
        return super().CountCosts(p, tally, x, labels)[:2]


class DenseTask(base_model.BaseTask):
    """A pipelined stack of dense blocks."""

    @classmethod
    def Params(cls) -> Any:
        p = super().Params()
        p.Define("stack", None, "The stack.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.CreateChild("stack", self.params.stack)

    def ComputePredictions(self, theta: Any, input_batch: Any) -> Any:
        return self.stack.FProp(theta.stack, input_batch.inputs, input_batch.labels)

    def ComputeLoss(self, theta: Any, predictions: Any, input_batch: Any) -> Any:
        loss, number = predictions[:2]
        return {"loss": (loss / number, number)}, {}


class Dense(base_model_params.SingleTaskModelParams):
    """Residual blocks of two products, and a softmax."""

    PLAN = Plan()

    def Train(self) -> Any:
        return DatasetInput.Params().Set(name="Train", dataset=_batches, batch_size=ROWS)

    def Task(self) -> Any:
        plan = self.PLAN
        block = Block.Params().Set(input_dim=WIDTH, hidden_dim=HIDDEN)
        layers = named_layers(
            [
                *(block.Copy() for _ in range(BLOCKS)),
                Head.Params().Set(input_dim=WIDTH, vocab_size=CLASSES),
            ]
        )
        cuts = plan.boundaries or tuple(
            round(i * len(layers) / plan.num_stages) for i in range(plan.num_stages + 1)
        )
        stack = PipeliningLayer.ForPlan(
            plan,
            cell_tpl=stage_params(layers, Partition(cuts, (1.0,) * plan.num_stages)),
            loss_inside=True,
        )
        p = DenseTask.Params().Set(name="dense", stack=stack)
        p.train.learner = learner.Learner.Params().Set(
            name="loss",
            learning_rate=1e-4,
            optimizer=optimizer.Adam.Params(),
            lr_schedule=schedule.Constant.Params(),
        )
        return p


def _batches() -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=[ROWS, LENGTH, WIDTH]).astype(np.float32)
    labels = rng.integers(CLASSES, size=[ROWS, LENGTH]).astype(np.int32)
    return tf.data.Dataset.from_tensors((inputs, labels)).repeat()


FAMILIES = {"language": Language, "dense": Dense}
