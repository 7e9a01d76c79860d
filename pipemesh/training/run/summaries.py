"""Scalars and histograms for TensorBoard; failures to write them never end a run."""

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

# Steps to wait after a failure.
_STEPS_BETWEEN_TRIES = 100


class Summaries:
    """Event files in a folder, each curve in its subfolder.

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
        # The step of the next try after a failure: each try leaves a file.
        self._again: dict[str, int] = {}

    def write(
        self,
        name: str,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, np.ndarray] = types.MappingProxyType({}),
    ) -> None:
        """Writes scalars and histograms of a step, by tag, to the curve `name`."""
        if step < self._again.get(name, step):
            return
        try:
            if name not in self._writers:
                path = os.path.join(self._folder, name)
                self._writers[name] = tf.summary.create_file_writer(path)
            with self._writers[name].as_default(step=step):
                for key, value in values.items():
                    # Perplexities can exceed float32, and TensorFlow rejects such numbers.
                    with np.errstate(over="ignore"):
                        tf.summary.scalar(key, np.float32(value))
                for key, value in histograms.items():
                    tf.summary.histogram(key, value)
            self._writers[name].flush()
        except (OSError, tf.errors.OpError) as error:
            # Do not append to a partly written file.
            self._writers.pop(name, None)
            if name not in self._again:
                tqdm.write(
                    f"summaries of step {step} cannot be written ({reason(error)}); training "
                    "goes on",
                    file=sys.stderr,
                )
            self._again[name] = step + _STEPS_BETWEEN_TRIES
