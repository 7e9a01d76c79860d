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
from pipemesh.training.saving import Saving
from pipemesh.training.spikes import Spikes
from pipemesh.training.whole_updates import all_or_none

__all__ = ["Batches", "Saving", "Spikes", "all_or_none", "prepare_optimizer"]
