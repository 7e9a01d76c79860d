"""Keras models and layers: their parts, calls and masks, which Keras keeps private."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def layers_within(layer: Any) -> list[Any]:
    """Returns a layer and all layers inside."""
    return list(layer._flatten_layers())


def parts_of(layer: Any) -> list[Any]:
    """Returns the layers directly inside a layer."""
    return list(layer._layers)


def is_functional(model: Any) -> bool:
    """Returns whether a model knows the calls of its layers and computes nothing else."""
    is_own = isinstance(model, keras.Model) and hasattr(model, "_outputs_struct")
    return is_own and type(model).call.__module__.startswith("keras.")


def functional_of(model: keras.Sequential) -> Any:
    """Returns the functional model of a sequential one, None if its input shape is not known."""
    return model._functional if model.built else None


def nesting_of(model: Any) -> Any:
    """Returns the outputs of a functional model, as it nests them."""
    return model._outputs_struct


def calls_in_order(model: Any) -> Iterator[Any]:
    """Yields the nodes of a functional model, in the order in which Keras calls them."""
    for _, nodes in sorted(model._nodes_by_depth.items(), reverse=True):
        yield from nodes


def takes_training(operation: Any) -> bool:
    """Returns whether the call of a layer takes `training`."""
    return bool(getattr(operation, "_call_has_training_arg", False))


def mask_of(tensor: Any) -> Any:
    """Returns the mask of a tensor, None without one."""
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a tensor that has a mask."""
    copy: Any = tf.identity(tensor)
    copy._keras_mask = tf.cast(mask, tf.bool)
    return copy
