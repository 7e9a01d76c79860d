"""A Keras model as a lingvo task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from lingvo.core import base_model, py_utils

from pipemesh import randomness
from pipemesh.errors import PipelineError
from pipemesh.layers.dataset_input import as_batch
from pipemesh.layers.keras_layer import KerasLayer
from pipemesh.layers.keras_means import loss_mean, metric_means
from pipemesh.layers.step_seed import step_of_call, whole_batch_randomness


class KerasTask(base_model.BaseTask):
    """A Keras 3 model that is trained as a whole, for registration with lingvo in a few lines.

    Its weights are those of a `KerasLayer`. It computes the whole batch once, without a pipeline.
    So everything that `keras.Model.fit` honours works here: regularizers and `add_loss` are part of
    the loss, and constraints are applied after each step. Updates by layers, such as the averages
    of `BatchNormalization`, happen once a step, in `PostTrainingStepUpdate`. It must run after the
    weights are updated. So a step that fails changes nothing, and evaluation changes nothing. The
    updated values are saved as variables that are not trainable.

    A batch is a NestedMap with `inputs`, `labels` and optional `weights`, or a tuple of these. The
    model is called with `inputs`. Nested inputs reach the model as dicts, lists and tuples.

    The metric `loss` is the mean of `loss` over all examples, weighted by `weights`, plus the
    losses that the model adds. The other metrics are weighted means too. Keras divides by the
    number of examples; here the divisor is the sum of weights (in Keras,
    `reduction="mean_with_sample_weight"`). Both are equal without weights or if the weights have
    mean 1. Examples of weight 0 do not count, but `BatchNormalization` sees them while it trains.

    "accuracy" has the meaning of Keras. With one output it compares it with 0.5 (`binary_accuracy`,
    for probabilities, not logits). With several outputs it compares the greatest with the label,
    given as a number (`sparse_categorical_accuracy`) or one-hot (`categorical_accuracy`). Other
    names are those of functions in `keras.metrics`.

    Example:
        >>> import keras
        >>> from lingvo.core import py_utils
        >>> def model():
        ...     return keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
        >>> params = KerasTask.Params().Set(
        ...     name="small", model=model, metrics=["accuracy"],
        ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> py_utils.SetEagerMode(True, test_mode=True)
        >>> task = params.Instantiate()
        >>> metrics, _ = task.FPropTower(task.theta, (tf.ones([4, 2]), tf.zeros([4], tf.int32)))
        >>> sorted(metrics), metrics.loss[1].numpy()
        (['accuracy', 'loss'], np.float32(4.0))
        >>> py_utils.SetEagerMode(False, test_mode=True)
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `model`, `input_shapes`, `loss` and `metrics`."""
        p = super().Params()
        p.name = "keras"
        p.Define(
            "model",
            None,
            "A function that makes a new Keras model, or a model, which is copied by its config.",
        )
        p.Define(
            "input_shapes",
            None,
            "A shape for each input, such as [[None, 28, 28, 1]]; None for a model that is built, "
            "as one with a keras.Input is.",
        )
        p.Define(
            "loss",
            None,
            "A loss of Keras by its name, a keras.losses.Loss, or a function of labels and outputs "
            "that returns a value for each example.",
        )
        p.Define(
            "metrics",
            [],
            "Names of functions in keras.metrics, or 'accuracy'; or functions of labels and "
            "outputs that return a value for each example.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._loss_mean = loss_mean(p.name, p.loss)
        self._metric_means = metric_means(p.name, p.metrics)
        self.CreateChild(
            "model", WholeBatchLayer.Params().Set(layer=p.model, input_shapes=p.input_shapes)
        )

    def ComputePredictions(self, theta: Any, input_batch: Any) -> Any:
        """Calls the model.

        Args:
            theta: weights.
            input_batch: a batch with `inputs`.

        Returns:
            A NestedMap with `outputs` and `penalty`, the losses that the model adds.

        Raises:
            PipelineError: the batch has no inputs.
        """
        inputs = self._part(as_batch(input_batch), "inputs")
        outputs, penalty = self.model.FProp(theta.model, _plain(inputs))
        return py_utils.NestedMap(outputs=outputs, penalty=penalty)

    def ComputeLoss(self, theta: Any, predictions: Any, input_batch: Any) -> Any:
        """Computes the weighted means.

        Args:
            theta: weights, not used.
            predictions: the result of `ComputePredictions`.
            input_batch: a batch with `labels` and optional `weights`.

        Returns:
            Pairs of mean and sum of weights, by name; and an empty NestedMap, for examples.

        Raises:
            PipelineError: labels or weights do not fit the outputs.
        """
        del theta
        batch = as_batch(input_batch)
        labels, outputs = _plain(self._part(batch, "labels")), predictions.outputs
        mean, total = self._loss_mean(labels, outputs, batch.get("weights"))
        metrics = py_utils.NestedMap(loss=(mean + tf.cast(predictions.penalty, mean.dtype), total))
        for name, metric in self._metric_means.items():
            value, total = metric(labels, outputs, batch.get("weights"))
            metrics[name] = (tf.stop_gradient(value), total)
        return metrics, py_utils.NestedMap()

    def _part(self, batch: Any, name: str) -> Any:
        if name not in batch:
            raise PipelineError(
                f"{self.params.name}: the batch has no {name!r}, but {sorted(batch)}; give a "
                "NestedMap or dict with inputs, labels and perhaps weights, or a tuple of these"
            )
        return batch[name]


class WholeBatchLayer(KerasLayer):
    """A `KerasLayer` that sees each batch once, whole, and may therefore update itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._updates: dict[str, tf.Tensor] = {}

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Returns the outputs of the layer and the sum of the losses that it adds."""
        if not self.do_eval:
            # Averages are updated from their own values, not from values rounded to `fprop_dtype`.
            own = {name: self.vars[name].value() for name in self._untrained()}
            theta = py_utils.NestedMap({**theta, **own})
        with (
            whole_batch_randomness(step_of_call(self)),
            randomness.layer_scope(self.params.name),
        ):
            called = self._call(theta, *args)
        if not self.do_eval:
            self._updates = called.changed
        penalties = [tf.cast(penalty, tf.float32) for penalty in called.penalties]
        return called.outputs, tf.add_n(penalties) if penalties else tf.zeros([])

    def _untrained(self) -> list[str]:
        return [name for name, variable in self._kept.items() if not variable.trainable]

    def PostTrainingStepUpdate(self) -> Any:
        """Returns an operation for the updates of the last training call and the constraints."""
        updates = [self.vars[name].assign(value) for name, value in self._updates.items()]
        self._updates = {}
        return tf.group(super().PostTrainingStepUpdate(), *updates)


def _plain(inputs: Any) -> Any:
    """Converts NestedMaps to dicts, which Keras supports."""
    if isinstance(inputs, Mapping):
        return {name: _plain(value) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(_plain(value) for value in inputs)
    return inputs
