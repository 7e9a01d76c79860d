"""TF1's optimizers, which make their variables late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def create_slots(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Makes an optimizer's own variables now, not when gradients are applied for the first time.

    Their names do not depend on how many models this process has made before.

    Args:
        optimizer: a `tf.compat.v1.train.Optimizer`.
        variables: that it will update.
    """
    for root in sorted({variable.name.split(":")[0].split("/")[0] for variable in variables}):
        # Whoever leaves a scope forgets which names are taken below it.
        with tf.compat.v1.variable_scope(root) as scope:
            assert scope.name == root
    optimizer._create_slots(variables)
