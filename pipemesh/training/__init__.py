"""Training: what goes from step to step, and outlives a process.

Example:
    >>> import tensorflow as tf
    >>> from pipemesh.training import Batches
    >>> batches = Batches(tf.data.Dataset.range(3).repeat())
    >>> [int(batches.next()) for _ in range(4)]
    [0, 1, 2, 0]
"""

# First: it says what is missing.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

from pipemesh.training.batches import Batches
from pipemesh.training.optimizer import prepare_optimizer

__all__ = ["Batches", "prepare_optimizer"]
