"""A Keras model as a configuration registered with lingvo."""

from typing import Any

import keras
from lingvo import model_registry

from pipemesh.layers import KerasTask

from .params import DigitsParams, trained_as


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


@model_registry.RegisterSingleTaskModel
class DigitsKeras(DigitsParams):
    """A Keras model with convolutions, batch normalization and dropout."""

    def Task(self) -> Any:
        """Returns the params of the task."""
        p = KerasTask.Params().Set(
            name="digits",
            model=convolutional,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        return trained_as(self, p)
