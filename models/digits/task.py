"""The lingvo tasks: one with a sequence of layers, and one with a pipeline."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from lingvo.core import base_model, py_utils

from pipemesh.layers import PipeliningLayer


class Classifier(base_model.BaseTask):
    """A task that maps images to classes with a sequence of lingvo layers.

    Batches have `inputs`, `labels` and, if some rows are padding, `weights`.
    """

    @classmethod
    def Params(cls) -> Any:
        p = super().Params()
        p.Define("layers", [], "Params of the layers, from images to logits, with names.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for layer in self.params.layers:
            self.CreateChild(layer.name, layer)

    def ComputePredictions(self, theta: Any, input_batch: Any) -> tf.Tensor:
        """Returns logits [batch, classes]."""
        values = input_batch.inputs
        for layer in self.params.layers:
            values = self.children[layer.name].FProp(theta[layer.name], values)
        return values

    def ComputeLoss(self, theta: Any, predictions: tf.Tensor, input_batch: Any) -> Any:
        """Returns the metrics `loss` (cross entropy in nats) and `accuracy`, means without
        padding.
        """
        del theta
        labels = input_batch.labels
        weights = input_batch.get("weights", tf.ones(labels.shape))
        total = tf.reduce_sum(weights)

        def mean(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.math.divide_no_nan(tf.reduce_sum(values * weights), total), total

        xent = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions)
        right = tf.equal(tf.argmax(predictions, -1, tf.int32), labels)
        metrics = py_utils.NestedMap(loss=mean(xent), accuracy=mean(tf.cast(right, tf.float32)))
        return metrics, py_utils.NestedMap()


class PipelinedClassifier(Classifier):
    """A `Classifier` whose layers are the stages of `stack`."""

    @classmethod
    def Params(cls) -> Any:
        p = super().Params()
        p.Define("stack", PipeliningLayer.Params(), "From images to logits.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.CreateChild("stack", self.params.stack)

    def ComputePredictions(self, theta: Any, input_batch: Any) -> tf.Tensor:
        """Returns logits [batch, classes]."""
        return self.stack.FProp(theta.stack, input_batch.inputs)
