"""Training: a trainer for any lingvo task, with evaluation, checkpoints and measurements.

Importing this package loads no TensorFlow; using one of its names does.

Example:
    >>> import tensorflow as tf
    >>> from pipemesh.training import Batches
    >>> batches = Batches(tf.data.Dataset.range(3).repeat())
    >>> [int(batches.next()) for _ in range(4)]
    [0, 1, 2, 0]
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipemesh.training.evaluation import evaluate
    from pipemesh.training.inputs import Batches
    from pipemesh.training.registered import RegisteredModel, find_model
    from pipemesh.training.run import Options
    from pipemesh.training.subject import Subject
    from pipemesh.training.trained_task import all_or_none, prepare_optimizer
    from pipemesh.training.trainer import Trainer

__all__ = [
    "Batches",
    "Options",
    "RegisteredModel",
    "Subject",
    "Trainer",
    "all_or_none",
    "evaluate",
    "find_model",
    "prepare_optimizer",
]

_MODULES = {
    "Batches": "inputs",
    "Options": "run",
    "Subject": "subject",
    "Trainer": "trainer",
    "RegisteredModel": "registered",
    "all_or_none": "trained_task",
    "evaluate": "evaluation",
    "find_model": "registered",
    "prepare_optimizer": "trained_task",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Import this first: it raises a clear error if TensorFlow is missing.
    importlib.import_module("pipemesh.needs_tensorflow")
    # Import this before lingvo: it makes lingvo loadable on every system.
    importlib.import_module("pipemesh.layers")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
