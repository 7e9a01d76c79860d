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
    """Data and optimizer settings; attributes may be changed on an instance before its
    methods run.
    """

    BATCH_SIZE = 64
    SEED = 0
    NUM_STEPS = 300
    # The rate of the first step; it falls along a cosine to a hundredth at the last step.
    LEARNING_RATE = 0.01

    def Train(self) -> Any:
        """Returns the params of endless training batches."""
        batches = functools.partial(train_dataset, self.BATCH_SIZE, self.SEED)
        return DatasetInput.Params().Set(name="Train", dataset=batches, batch_size=self.BATCH_SIZE)

    def Dev(self) -> Any:
        """Returns the held-out digits, as `Test` does: nothing is selected with them."""
        return self.Test().Set(name="Dev")

    def Test(self) -> Any:
        """Returns the params of the held-out digits, once and in order."""
        batches = functools.partial(heldout_dataset, self.BATCH_SIZE)
        return DatasetInput.Params().Set(name="Test", dataset=batches, batch_size=self.BATCH_SIZE)


class LayersParams(DigitsParams):
    """A network of lingvo layers."""

    CHANNELS = (16, 32, 64)
    # lingvo's BatchNormLayer has the same weights, but assigns in FProp, which a stage must not do.
    NORM = bn_layers.BatchNormLayerNoPadding.Params().Set(decay=0.9)


# These are functions, because lingvo takes public methods of a configuration for datasets.


def layers_of(config: LayersParams) -> list[Any]:
    """Returns the params of all layers, first to last, with the names that a pipeline uses."""
    return named_layers(network(config.CHANNELS, config.NORM))


def trained_as(config: DigitsParams, task: Any) -> Any:
    """Returns a task's params with the training settings."""
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
    """A sequence of lingvo layers without a pipeline."""

    def Task(self) -> Any:
        """Returns the params of the task."""
        p = Classifier.Params().Set(name="digits", layers=layers_of(self))
        return trained_as(self, p)


@model_registry.RegisterSingleTaskModel
class DigitsPipelined(LayersParams):
    """The layers of DigitsPlain in a pipeline; checkpoints fit both."""

    NUM_STAGES = 2
    NUM_MICROBATCHES = 4

    def Task(self) -> Any:
        """Returns the params of the task."""
        microbatch = tshape.Shape([self.BATCH_SIZE // self.NUM_MICROBATCHES, SIDE, SIDE, 1])
        p = PipelinedClassifier.Params().Set(name="digits")
        p.stack = PipeliningLayer.Params().Set(
            cell_tpl=PartitionSequentialLayers(layers_of(self), self.NUM_STAGES, microbatch),
            num_micro_batches=self.NUM_MICROBATCHES,
        )
        return trained_as(self, p)
