"""TF1's optimizers, which make their variables late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def create_slots(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Makes an optimizer's own variables now, not when gradients are applied for the first time.

    Args:
        optimizer: a `tf.compat.v1.train.Optimizer`.
        variables: that it will update.
    """
    optimizer._create_slots(variables)
