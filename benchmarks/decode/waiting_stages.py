"""Stages that wait instead of computing, and a decoder that passes groups through them.

What is left is what decoding costs itself: the rate is held against that of the table.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.layers import PipeliningLayer, mesh_cluster  # isort: skip
from lingvo.core import base_layer

from pipemesh.decoding import Continuation, Decoder, Generator, Sampler
from pipemesh.layers.named.cache import current_cache
from pipemesh.mesh import Mesh
from pipemesh.schedule import Costs, decode, simulate

VOCAB, LENGTH = 4, 64


class Waiting(base_layer.BaseLayer):
    """Waits; the last one says that the next token is one more than this one."""

    @classmethod
    def Params(cls) -> Any:
        """Params of this layer."""
        p = super().Params()
        p.Define("wait", None, "Called with the place of the first token, and its id; returns 0.")
        p.Define("last", False, "Whether it returns logits.")
        return p

    def FProp(self, theta: Any, ids: Any, places: Any) -> Any:
        """Waits, and returns what it got, or logits."""
        del theta
        # Not stateful: TensorFlow executes what is stateful one after the other.
        # And not of places alone, which are the same for all groups: it would compute them once.
        inputs = [places[0, 0], ids[0, 0]]
        nothing = tf.numpy_function(self.params.wait, inputs, tf.int32, stateful=False)
        ids += tf.reshape(nothing, [])
        if not self.params.last:
            return ids, places
        ids = tf.gather(ids, current_cache().last, batch_dims=1)
        return tf.one_hot((ids + 1) % VOCAB, VOCAB)


class Task:
    """What a generator asks of a task."""

    def DecodeArgs(self, ids: Any, places: Any) -> Any:
        """What the stages take."""
        return ids, places


class Wait(NamedTuple):
    """When a group was at a stage, in seconds; `place` is that of the token."""

    stage: int
    begin: float
    end: float
    place: int


class Measured(NamedTuple):
    """What was measured.

    Attributes:
        rate: tokens a second.
        steady: what as many groups give on as many stages that do nothing but wait.
        simulated: what the table gives, its beginning and end included.
        waits: all of them.
        found: what was said.
    """

    rate: float
    steady: float
    simulated: float
    waits: list[Wait]
    found: list[Continuation]


class Waiters:
    """A decoder whose stages wait.

    Args:
        num_stages: stages, each on a device.
        num_groups: groups of one prompt; that of number `g` has `g + 1` tokens.
        seconds: that a stage takes.
    """

    def __init__(self, num_stages: int, num_groups: int, seconds: float) -> None:
        self._counts, self._seconds = (num_stages, num_groups), seconds
        self._waits: list[Wait] = []
        self._lock = threading.Lock()
        cells = [
            Waiting.Params().Set(
                name=f"stage{number}", wait=self._wait(number), last=number == num_stages - 1
            )
            for number in range(num_stages)
        ]

        def cluster() -> Any:
            return mesh_cluster(Mesh.from_text(f"layers:{num_stages}"), "CPU", True)

        with cluster():
            p = PipeliningLayer.Params().Set(name="stack", num_micro_batches=1, cell_tpl=cells)
            stack = p.Instantiate()
        self._decoder = Decoder(
            Generator(Task(), stack, cluster, LENGTH, Sampler()),
            rows=1,
            groups=num_groups,
            length=LENGTH,
            vocab_size=VOCAB,
        )
        self._prompts = [[1] * (1 + number) for number in range(num_groups)]

    def _wait(self, stage: int) -> Callable[[Any, Any], Any]:
        def wait(place: Any, _: Any) -> Any:
            begin = time.perf_counter()
            time.sleep(self._seconds)
            with self._lock:
                self._waits.append(Wait(stage, begin, time.perf_counter(), int(place)))
            return np.int32(0)

        return wait

    def measure(self, tokens: int) -> Measured:
        """Adds so many tokens to each prompt."""
        self._waits.clear()
        begin = time.perf_counter()
        found = list(self._decoder.generate(self._prompts, tokens))
        seconds = time.perf_counter() - begin
        stages, groups = self._counts
        # As long as waits were: a busy machine wakes nobody in time.
        wait = float(np.mean([each.end - each.begin for each in self._waits]))
        table = simulate(decode(stages, groups, tokens), Costs(forward=wait))
        return Measured(
            rate=groups * tokens / seconds,
            steady=groups / max(groups, stages) / wait,
            simulated=groups * tokens / table.makespan,
            waits=list(self._waits),
            found=found,
        )
