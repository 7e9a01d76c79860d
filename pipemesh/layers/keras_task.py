"""A Keras model as a task of lingvo, with the means of its losses and metrics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from lingvo.core import base_model, py_utils

from pipemesh import randomness
from pipemesh.errors import PipelineError
from pipemesh.layers.dataset_input import as_batch
from pipemesh.layers.foreign_layers import KerasLayer
from pipemesh.layers.keras_cells import masked_stack, with_masks
from pipemesh.layers.step_seed import step_of_call, whole_batch_randomness

_ACCURACY = ("accuracy", "acc")


class _Unreduced(keras.losses.Loss):
    """A function of labels and outputs, with the casts and masks of Keras losses."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="values", reduction="none")
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)


def _weighted_mean(
    name: str, function: Callable[..., Any], labels: Any, outputs: Any, weights: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean of a function over the examples (0 without weight) and the sum of weights.

    Labels and outputs are cast and brought to the same rank as in Keras losses. Values that a Keras
    mask leaves out do not count. Without weights all are 1.
    """
    if isinstance(outputs, (Mapping, list, tuple)) and _is_of_keras(function):
        # Keras would stack them and treat outputs as examples.
        raise PipelineError(
            f"{name} is of one output, but the model has {len(outputs)}; give a function of all "
            "labels and outputs that returns a value for each example"
        )
    if isinstance(labels, tf.Tensor) and isinstance(outputs, tf.Tensor):
        # Only this tensor has the mask of the outputs, so the labels are changed.
        labels, function = _fitted(labels, outputs, function)
    values: Any = _Unreduced(function)(labels, outputs)
    if not values.shape.rank:
        raise PipelineError(
            f"{name} gave a scalar for the whole batch; it must return a value for each example, "
            "as functions of keras.losses and keras.metrics do"
        )
    ones: Any = _Unreduced(lambda y_true, y_pred: tf.ones_like(values))(labels, outputs)
    if weights is not None:
        missing = values.shape.rank - weights.shape.rank
        if missing < 0 or not values.shape[: weights.shape.rank].is_compatible_with(weights.shape):
            raise PipelineError(
                f"{name} has values of shape {values.shape}, but weights have shape "
                f"{weights.shape}; give one for each example, [{values.shape[0]}], or for each "
                "value"
            )
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))
        weights = tf.cast(weights, values.dtype)
        values, ones = values * weights, ones * weights
    total = tf.reduce_sum(ones)
    mean = tf.math.divide_no_nan(tf.reduce_sum(values), total)
    return tf.cast(mean, tf.float32), tf.cast(total, tf.float32)


# A function of labels, outputs and weights (or None) that returns a weighted mean and its weight.
Mean = Callable[[Any, Any, Any], tuple[tf.Tensor, tf.Tensor]]


def loss_mean(owner: str, loss: Any) -> Mean:
    """Returns the mean of a loss, given as in `KerasTask`, without the reduction of Keras."""
    if isinstance(loss, (Mapping, list, tuple)) and loss:
        raise PipelineError(
            f"{owner}: loss is a {type(loss).__name__}, {loss!r}; give one function of all labels "
            "and outputs, nested as the model returns them, that returns a value for each example"
        )
    try:
        found = keras.losses.get(loss)
    except ValueError as error:
        raise PipelineError(f"{owner}: Keras knows no loss {loss!r}") from error
    if found is None:
        raise PipelineError(
            f"{owner}: it has no loss; set loss to one of Keras, such as 'mse', or to a function "
            "of labels and outputs that returns a value for each example"
        )
    function: Any = found.call if isinstance(found, keras.losses.Loss) else found
    return functools.partial(_weighted_mean, f"{owner}: loss {loss!r}", function)


def metric_means(owner: str, metrics: Iterable[Any]) -> dict[str, Mean]:
    """Returns the means of metrics by name; one that is no mean over examples is an error."""
    means: dict[str, Mean] = {}
    for metric in metrics:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
        function: Any = metric
        if isinstance(metric, str):
            function = _accuracy if name in _ACCURACY else getattr(keras.metrics, name, None)
        known = callable(function) and not inspect.isclass(function)
        if not known or isinstance(function, keras.metrics.Metric):
            raise PipelineError(
                f"{owner}: metric {metric!r} is no function that says something of each example; "
                "give 'accuracy', the name of a function in keras.metrics, such as "
                "'top_k_categorical_accuracy', or a function of labels and outputs"
            )
        if not name.isidentifier() or name == "loss":
            raise PipelineError(
                f"{owner}: a metric cannot be named {name!r}; give a function with a name of its "
                "own"
            )
        if name in means:
            raise PipelineError(
                f"{owner}: two metrics are named {name!r}; give their functions different names"
            )
        means[name] = functools.partial(_weighted_mean, f"{owner}: metric {name!r}", function)
    return means


def _is_of_keras(function: Any) -> bool:
    """Returns whether a function, or the loss whose method it is, belongs to Keras."""
    owner = type(function.__self__) if inspect.ismethod(function) else function
    return owner is _accuracy or str(getattr(owner, "__module__", "")).startswith("keras.")


def _accuracy(labels: Any, outputs: Any) -> Any:
    """Computes the accuracy that Keras selects by the shapes."""
    if outputs.shape[-1] == 1:
        return keras.metrics.binary_accuracy(labels, outputs)
    if labels.shape.rank < outputs.shape.rank or labels.shape[-1] == 1:
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)
    return keras.metrics.categorical_accuracy(labels, outputs)


def _fitted(
    labels: tf.Tensor, outputs: tf.Tensor, function: Callable[..., Any]
) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Fits ranks that differ by a last dim of 1, as Keras does."""
    more = labels.shape.rank - outputs.shape.rank
    if more == 1 and labels.shape[-1] == 1:
        if outputs.shape.rank == 1:
            return labels, lambda y_true, y_pred: function(y_true, tf.expand_dims(y_pred, -1))
        return tf.squeeze(labels, -1), function
    if more == -1 and outputs.shape[-1] == 1:
        if labels.shape.rank == 1:
            return tf.expand_dims(labels, -1), function
        return labels, lambda y_true, y_pred: function(y_true, tf.squeeze(y_pred, -1))
    return labels, function


class KerasTask(base_model.BaseTask):
    """A Keras 3 model as a task, for registration with lingvo in a few lines.

    A `model` is trained as a whole. Its weights are those of a `KerasLayer`. It computes the whole
    batch once, without a pipeline.

    With a `stack` in its place, a `PipeliningLayer` of `keras_layers`, the model is cut into
    stages, and a layout splits its weights. `KerasLayer` lists what its layers may not do there.
    Nested inputs reach the first layer one by one.

    Regularizers and `add_loss` are part of the loss. Constraints, and updates by layers such as
    `BatchNormalization`, belong to `PostTrainingStepUpdate`, which must run after each update of
    the weights.

    A batch is a NestedMap with `inputs`, `labels` and optional `weights`, or a tuple of these.
    Nested inputs reach the model as dicts, lists and tuples.

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
        >>> def model():
        ...     return keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
        >>> params = KerasTask.Params().Set(
        ...     name="small", model=model, loss="mse", metrics=["mean_absolute_error"])
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `model` or `stack`, `input_shapes`, `loss` and `metrics`."""
        p = super().Params()
        p.name = "keras"
        p.Define(
            "model", None, "A Keras model, copied by its config, or a function that makes one."
        )
        p.Define("stack", None, "Params of a PipeliningLayer of `keras_layers`, without a model.")
        p.Define("input_shapes", None, "Of `model`, as for a KerasLayer.")
        p.Define(
            "loss",
            None,
            "A loss of Keras by its name, a keras.losses.Loss, or a function of labels and outputs "
            "that returns a value for each example.",
        )
        p.Define(
            "metrics",
            [],
            "Names of functions in keras.metrics, or 'accuracy'; or functions as for loss.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._loss_mean = loss_mean(p.name, p.loss)
        self._metric_means = metric_means(p.name, p.metrics)
        if p.stack is not None:
            if p.model is not None:
                raise PipelineError(f"{p.name}: model and stack are both set; give one of them")
            if p.input_shapes is not None:
                raise PipelineError(
                    f"{p.name}: input_shapes are those of a model, but the layers of a stack know "
                    "theirs; leave input_shapes out"
                )
            stack, self._nesting = masked_stack(p.stack)
            self.CreateChild("stack", stack)
            return
        self.CreateChild(
            "model", WholeBatchLayer.Params().Set(layer=p.model, input_shapes=p.input_shapes)
        )

    def ComputePredictions(self, theta: Any, input_batch: Any) -> Any:
        """Returns a NestedMap with `outputs` and `penalty`, the losses that the model adds."""
        inputs = _plain(self._part(as_batch(input_batch), "inputs"))
        if self.params.stack is not None:
            outputs = self.stack.FProp(theta.stack, *keras.tree.flatten(inputs))
            if self._nesting is not None:
                outputs = with_masks(self._nesting, outputs)
            return py_utils.NestedMap(outputs=outputs, penalty=tf.zeros([]))
        outputs, penalty = self.model.FProp(theta.model, inputs)
        return py_utils.NestedMap(outputs=outputs, penalty=penalty)

    def ComputeLoss(self, theta: Any, predictions: Any, input_batch: Any) -> Any:
        """Returns pairs of mean and sum of weights, by name; and nothing for each example."""
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
            values = {name: self.vars[name].value() for name in self.untrained}
            theta = py_utils.NestedMap({**theta, **values})
        with (
            whole_batch_randomness(step_of_call(self)),
            randomness.layer_scope(self.params.name),
        ):
            outputs, changed, penalties = self._call(theta, *args)
        if not self.do_eval:
            self._updates = changed
        penalties = [tf.cast(penalty, tf.float32) for penalty in penalties]
        return outputs, tf.add_n(penalties) if penalties else tf.zeros([])

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
