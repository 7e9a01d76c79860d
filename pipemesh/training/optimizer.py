"""The optimizer of a lingvo learner, before the first step."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.saved_state import create_slots


def prepare_optimizer(learner: Any, variables: Sequence[tf.Variable], step: tf.Variable) -> None:
    """Creates the optimizer's variables now.

    A checkpoint can then be restored into them. TensorFlow traces the training function only once:
    it retraces a function that creates variables.

    Args:
        learner: a lingvo learner.
        variables: the variables that it will update.
        step: the global step.
    """
    lingvo_optimizer = learner.optimizer
    with py_utils.GlobalStepContext(step):
        slots = lingvo_optimizer.GetOptimizer(learner.LearningRate)
    with tf.init_scope():
        create_slots(slots, variables)
    lingvo_optimizer._optimizer = slots
