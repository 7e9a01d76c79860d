"""Dropout with the same mask under every plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh import randomness
from pipemesh.errors import PipelineError
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.step_seed import GenerateStepSeedPair, step_of_call, whole_batch_randomness
from pipemesh.lowering import Tensor, ops


class Dropout(NamedLayer):
    """Sets elements to zero, and scales the others up; in evaluation it does nothing.

    The mask is keyed by the global step and the layer, and every processor has its slice of one
    mask. So it does not depend on the layout, nor on the stages and microbatches of a pipeline.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines the rate."""
        p = super().Params()
        p.Define("rate", 0.0, "Probability of an element to be dropped; 0 or more, less than 1.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not isinstance(p.rate, int | float) or not 0 <= p.rate < 1:
            raise PipelineError(
                f"{p.name}: rate is {p.rate!r}; it is the probability of being dropped, a number "
                "from 0 on and below 1"
            )

    def FProp(self, theta: Any, x: Tensor) -> Tensor:
        """Drops elements of `x`, which may have any dims."""
        del theta
        p = self.params
        x = self.Named(x, x.shape)
        if self.do_eval or p.rate == 0:
            return x
        with self._Randomness():
            return ops.dropout(x, rate=p.rate, seed=GenerateStepSeedPair(p))

    @contextlib.contextmanager
    def _Randomness(self) -> Iterator[None]:
        if randomness.is_active():
            yield
            return
        # Outside a pipeline it is a stack of one layer.
        with whole_batch_randomness(step_of_call(self)), randomness.layer_scope(self.path):
            yield

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any) -> Value:
        """Counts the mask; sizes without names are those of `batch;length;embed`."""
        x = (
            x
            if isinstance(x, Value)
            else tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        )
        if p.rate == 0:
            return x
        tally.keep(tally.made(x.shape, x, tf.bool))
        return tally.made(x.shape, x)
