"""Histograms of weights, gradients and updates."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Histograms:
    """Weights before and after every `every`-th step; `every` 0 means never.

    Example:
        >>> w = tf.Variable([1.0, 2.0])
        >>> histograms = Histograms({"w": [w]}, every=2)
        >>> for step in (1, 2):
        ...     histograms.before(step)
        ...     _ = w.assign_add([0.5, 0.0])
        ...     print({name: v.tolist() for name, v in histograms.after().items()})
        {}
        {'weights/w': [2.0, 2.0], 'updates/w': [0.5, 0.0]}
    """

    def __init__(self, weights: Mapping[str, Sequence[tf.Variable]], every: int) -> None:
        self._weights, self._every = weights, every
        self._before: dict[str, np.ndarray] = {}

    def before(self, step: int) -> None:
        """Copies the weights, if histograms of the coming step are due."""
        is_due = self._every and step % self._every == 0
        self._before = self._values() if is_due else {}

    def after(
        self, gradients: Mapping[str, Sequence[tf.Tensor]] = types.MappingProxyType({})
    ) -> dict[str, np.ndarray]:
        """Returns weights, updates and gradients after a step, by tag; {} if none are due."""
        if not self._before:
            return {}
        before, self._before = self._before, {}
        found: dict[str, np.ndarray] = {}
        for name, value in self._values().items():
            found[f"weights/{name}"] = value
            found[f"updates/{name}"] = value - before[name]
        return found | {f"gradients/{name}": _joined(of) for name, of in gradients.items()}

    def _values(self) -> dict[str, np.ndarray]:
        return {name: _joined(parts) for name, parts in self._weights.items()}


def _joined(parts: Sequence[Any]) -> np.ndarray:
    return np.concatenate([part.numpy().ravel().astype(np.float32) for part in parts])
