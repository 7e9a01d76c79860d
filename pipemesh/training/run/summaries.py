"""Scalars and histograms for TensorBoard. That they cannot be written ends no training."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from pipemesh.checkpoint.reader import reason

# After a failure.
_STEPS_BETWEEN_TRIES = 100


class Summaries:
    """Event files below a folder.

    Args:
        folder: that they lie in; `train` is in a folder of that name in it.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> Summaries(folder).write("train", 7, {"loss": 2.5})
        >>> os.listdir(folder)
        ['train']
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        # The step from which on it is tried again: each try leaves a file.
        self._again: dict[str, int] = {}

    def write(
        self,
        name: str,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, np.ndarray] = types.MappingProxyType({}),
    ) -> None:
        """Writes what there is to see of a step.

        Args:
            name: of the curve, such as `train`.
            step: of it.
            values: by tag.
            histograms: by tag, what they are of.
        """
        if step < self._again.get(name, step):
            return
        try:
            if name not in self._writers:
                path = os.path.join(self._folder, name)
                self._writers[name] = tf.summary.create_file_writer(path)
            with self._writers[name].as_default(step=step):
                for key, value in values.items():
                    # Perplexities exceed what a float32 holds; TensorFlow takes no such number.
                    with np.errstate(over="ignore"):
                        tf.summary.scalar(key, np.float32(value))
                for key, value in histograms.items():
                    tf.summary.histogram(key, value)
            self._writers[name].flush()
        except (OSError, tf.errors.OpError) as error:
            # A file that was written in part is not written to again.
            self._writers.pop(name, None)
            if name not in self._again:
                tqdm.write(
                    f"summaries of step {step} cannot be written ({reason(error)}); training "
                    "goes on",
                    file=sys.stderr,
                )
            self._again[name] = step + _STEPS_BETWEEN_TRIES
