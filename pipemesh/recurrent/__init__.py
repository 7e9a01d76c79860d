"""Runs schedules: stages, microbatches and devices in, outputs and gradients out.

`Recurrent` runs one cell along time. `StackedRecurrent` runs a stack of cells on several devices.

Example:
    >>> import tensorflow as tf
    >>> from pipemesh.recurrent import Stage, pipeline
    >>> from pipemesh.schedule import gpipe
    >>> def scale(theta, carry, inputs, microbatch, step):
    ...     return [inputs[0] * theta[0]], []
    >>> weights = [tf.Variable(2.0), tf.Variable(3.0)]
    >>> @tf.function
    ... def loss_and_grads(x):
    ...     with tf.GradientTape() as tape:
    ...         stages = [
    ...             Stage(f"stage{i}", scale, [tf.convert_to_tensor(w)], [], "CPU:0")
    ...             for i, w in enumerate(weights)
    ...         ]
    ...         (y,), _ = pipeline(stages, [x], gpipe(2, 4))
    ...         loss = tf.reduce_sum(y)
    ...     return loss, tape.gradient(loss, weights)
    >>> loss, grads = loss_and_grads(tf.ones([8]))
    >>> float(loss), [float(g) for g in grads]
    (48.0, [24.0, 16.0])
"""

# First, because it reports a missing TensorFlow.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

from pipemesh.recurrent.executor import pipeline, pipeline_loss
from pipemesh.recurrent.forecast import (
    DeviceMemory,
    Transfer,
    memory_of,
    predict_memory,
    predict_transfers,
    transfers_of,
)
from pipemesh.recurrent.options import LossScale, Options
from pipemesh.recurrent.remat import REMAT_POLICIES, ByStage, RematPolicy, Selective
from pipemesh.recurrent.stage import Home, Slice, Stage, current_devices, current_slice, write_slice
from pipemesh.recurrent.time.recurrent import Recurrent
from pipemesh.recurrent.time.stacked_recurrent import StackedRecurrent
from pipemesh.recurrent.watch.clock import ActionClock
from pipemesh.recurrent.watch.explain import explain
from pipemesh.recurrent.watch.marks import Marks
from pipemesh.recurrent.watch.placement import Placement, record_placement

__all__ = [
    "REMAT_POLICIES",
    "ActionClock",
    "ByStage",
    "DeviceMemory",
    "Home",
    "LossScale",
    "Marks",
    "Options",
    "Placement",
    "Recurrent",
    "RematPolicy",
    "Selective",
    "Slice",
    "StackedRecurrent",
    "Stage",
    "Transfer",
    "current_devices",
    "current_slice",
    "explain",
    "memory_of",
    "pipeline",
    "pipeline_loss",
    "predict_memory",
    "predict_transfers",
    "record_placement",
    "transfers_of",
    "write_slice",
]
