"""Named configurations of the classifiers, registered with lingvo."""

from __future__ import annotations

import functools
from typing import Any

from lingvo import model_registry
from lingvo.core import base_model_params, bn_layers, learner, optimizer, schedule, tshape

from pipemesh.layers import DatasetInput, PartitionSequentialLayers, PipeliningLayer
from pipemesh.layers.partition_layers import named_layers

from .data import SIDE
from .datasets import heldout_dataset, train_dataset
from .network import network
from .task import Classifier, PipelinedClassifier


class DigitsParams(base_model_params.SingleTaskModelParams):
    """Batches, and how to learn.

    Attributes may be changed on an instance before its methods are called.
    """

    BATCH_SIZE = 64
    SEED = 0
    NUM_STEPS = 300
    # Of the first step; along a cosine it becomes a hundredth of that at the last one.
    LEARNING_RATE = 0.01

    def Train(self) -> Any:
        """Batches without end."""
        batches = functools.partial(train_dataset, self.BATCH_SIZE, self.SEED)
        return DatasetInput.Params().Set(name="Train", dataset=batches, batch_size=self.BATCH_SIZE)

    def Dev(self) -> Any:
        """The held-out digits, as Test: nothing is chosen by them."""
        return self.Test().Set(name="Dev")

    def Test(self) -> Any:
        """The held-out digits, once and in order."""
        batches = functools.partial(heldout_dataset, self.BATCH_SIZE)
        return DatasetInput.Params().Set(name="Test", dataset=batches, batch_size=self.BATCH_SIZE)


class LayersParams(DigitsParams):
    """A network of lingvo's layers."""

    CHANNELS = (16, 32, 64)
    # lingvo's BatchNormLayer has the same weights, but assigns in FProp: no stage may do that.
    NORM = bn_layers.BatchNormLayerNoPadding.Params().Set(decay=0.9)


# Functions of a configuration: its public methods would be data sets of lingvo.


def layers_of(config: LayersParams) -> list[Any]:
    """Params of all layers, first to last, named as a pipeline names them."""
    return named_layers(network(config.CHANNELS, config.NORM))


def trained_as(config: DigitsParams, task: Any) -> Any:
    """A task's params with those of its training."""
    task.train.learner = learner.Learner.Params().Set(
        name="loss",
        optimizer=optimizer.Adam.Params(),
        learning_rate=config.LEARNING_RATE,
        lr_schedule=schedule.CosineSchedule.Params().Set(
            final_value=0.01, total_steps=config.NUM_STEPS
        ),
    )
    task.train.max_steps = config.NUM_STEPS
    task.eval.samples_per_summary = 0
    task.random_seed = config.SEED
    return task


@model_registry.RegisterSingleTaskModel
class DigitsPlain(LayersParams):
    """Layers of lingvo, one after the other."""

    def Task(self) -> Any:
        """The task."""
        p = Classifier.Params().Set(name="digits", layers=layers_of(self))
        return trained_as(self, p)


@model_registry.RegisterSingleTaskModel
class DigitsPipelined(LayersParams):
    """The layers of DigitsPlain in a pipeline; its checkpoints fit both."""

    NUM_STAGES = 2
    NUM_MICROBATCHES = 4

    def Task(self) -> Any:
        """The task."""
        microbatch = tshape.Shape([self.BATCH_SIZE // self.NUM_MICROBATCHES, SIDE, SIDE, 1])
        p = PipelinedClassifier.Params().Set(name="digits")
        p.stack = PipeliningLayer.Params().Set(
            cell_tpl=PartitionSequentialLayers(layers_of(self), self.NUM_STAGES, microbatch),
            num_micro_batches=self.NUM_MICROBATCHES,
        )
        return trained_as(self, p)
