"""Keras losses and metrics as weighted means over examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from pipemesh.errors import PipelineError

_ACCURACY = ("accuracy", "acc")


class _Unreduced(keras.losses.Loss):
    """A function of labels and outputs, with the casts and masks of Keras losses."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="values", reduction="none")
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)


class WeightedMean:
    """The weighted mean of a Keras function over the examples.

    Labels and outputs are cast and brought to the same rank as in Keras losses. Values that a Keras
    mask leaves out do not count. The function returns a value for each example, or for each of its
    steps.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function

    def __call__(
        self, labels: Any, outputs: Any, weights: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean, 0 if all weights are 0, and the sum of weights, both float32 scalars.

        Weights are given for each example or each value; None counts each value as 1.

        Raises:
            PipelineError: the function returns a scalar, the weights do not fit the values, or a
                function of Keras, which takes one output, gets several.
        """
        if isinstance(outputs, (Mapping, list, tuple)) and _is_of_keras(self._function):
            # Keras would stack them and treat outputs as examples.
            raise PipelineError(
                f"{self.name} is of one output, but the model has {len(outputs)}; give a function "
                "of all labels and outputs that returns a value for each example"
            )
        if isinstance(labels, tf.Tensor) and isinstance(outputs, tf.Tensor):
            # Only this tensor has the mask of the outputs, so the labels are changed.
            labels, function = _fitted(labels, outputs, self._function)
        else:
            function = self._function
        values: Any = _Unreduced(function)(labels, outputs)
        if not values.shape.rank:
            raise PipelineError(
                f"{self.name} gave a scalar for the whole batch; it must return a value for each "
                "example, as functions of keras.losses and keras.metrics do"
            )
        ones: Any = _Unreduced(lambda y_true, y_pred: tf.ones_like(values))(labels, outputs)
        if weights is not None:
            weights = tf.cast(self._spread(weights, values), values.dtype)
            values, ones = values * weights, ones * weights
        total = tf.reduce_sum(ones)
        mean = tf.math.divide_no_nan(tf.reduce_sum(values), total)
        return tf.cast(mean, tf.float32), tf.cast(total, tf.float32)

    def _spread(self, weights: tf.Tensor, values: Any) -> tf.Tensor:
        """Broadcasts the weights of examples to the values."""
        missing = values.shape.rank - weights.shape.rank
        if missing < 0 or not values.shape[: weights.shape.rank].is_compatible_with(weights.shape):
            raise PipelineError(
                f"{self.name} has values of shape {values.shape}, but weights have shape "
                f"{weights.shape}; give one for each example, [{values.shape[0]}], or for each "
                "value"
            )
        return tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))


def loss_mean(owner: str, loss: Any) -> WeightedMean:
    """Returns the mean of a loss, given as in `KerasTask`.

    The reduction of a `keras.losses.Loss` is ignored.
    """
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
    return WeightedMean(f"{owner}: loss {loss!r}", function)


def metric_means(owner: str, metrics: Iterable[Any]) -> dict[str, WeightedMean]:
    """Returns the means of metrics by name."""
    means: dict[str, WeightedMean] = {}
    for metric in metrics:
        name, mean = metric_mean(owner, metric)
        if name in means:
            raise PipelineError(
                f"{owner}: two metrics are named {name!r}; give their functions different names"
            )
        means[name] = mean
    return means


def metric_mean(owner: str, metric: Any) -> tuple[str, WeightedMean]:
    """Returns the name and the mean of a metric.

    The metric is "accuracy", the name of a function in `keras.metrics`, or a function of labels and
    outputs. A metric that is not a mean over examples, such as an area under a curve, is an error.
    """
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
    function: Any = metric
    if isinstance(metric, str):
        function = _accuracy if name in _ACCURACY else getattr(keras.metrics, name, None)
    known = callable(function) and not inspect.isclass(function)
    if not known or isinstance(function, keras.metrics.Metric):
        raise PipelineError(
            f"{owner}: metric {metric!r} is no function that says something of each example; give "
            "'accuracy', the name of a function in keras.metrics, such as "
            "'top_k_categorical_accuracy', or a function of labels and outputs"
        )
    if not name.isidentifier() or name == "loss":
        raise PipelineError(
            f"{owner}: a metric cannot be named {name!r}; give a function with a name of its own"
        )
    return name, WeightedMean(f"{owner}: metric {name!r}", function)


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
