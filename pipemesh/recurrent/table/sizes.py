"""Bytes that a run holds and sends."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.values import GRADS, OUTPUTS, Kind
from pipemesh.schedule import Action


class Sizes:
    """Bytes on the devices of stages, known before anything runs."""

    def __init__(self, machine: Machine, modes: Mapping[tuple[int, int], Mode]) -> None:
        self._machine = machine
        self._modes = modes

    def weights(self, stage: int, places: Sequence[int]) -> int:
        """Returns the bytes of weights on devices of a stage's home, given by index.

        Several indices may name one device; equal weights on it count once.
        """
        held = self._machine.stages[stage]
        chosen = [i for i in range(len(held.theta)) if not {*held.holders(i)}.isdisjoint(places)]
        return num_bytes(specs_of([held.theta[i] for i in chosen]))

    def weights_sent(self, stage: int) -> Mapping[tuple[int, int], int]:
        """Returns the bytes of a stage's weights sent from device to device of its home."""
        held, sent = self._machine.stages[stage], collections.Counter[tuple[int, int]]()
        for i, (spec, owner) in enumerate(zip(specs_of(held.theta), held.owners, strict=True)):
            for place in held.holders(i):
                sent[owner, place] += num_bytes([spec])
        return sent

    def weights_fetched(self, action: Action) -> Mapping[tuple[int, int], int]:
        """Returns the bytes of weights that an action fetches, from device to device."""
        held, sent = self._machine.stages[action.stage], collections.Counter[tuple[int, int]]()
        if not held.fetched:
            return sent
        traced, count = self._machine.traced[action.stage], len(held.theta)
        used = {tensor for tensor, _ in traced.cut.uses(self._nodes(action))}
        for i, name in enumerate(traced.theta):
            if i % count in held.fetched and name in used:
                sent[held.owners[i % count], traced.place(name)] += num_bytes([traced.spec(name)])
        return sent

    def sums_sent(self, stage: int) -> Mapping[tuple[int, int], int]:
        """Returns the bytes of summed gradients sent from device to device of the home."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        sent = collections.Counter[tuple[int, int]]()
        for spec, place, owner in zip(
            passes.accumulator_specs,
            passes.accumulator_places,
            passes.accumulator_owners,
            strict=True,
        ):
            sent[place, owner] += num_bytes([spec])
        return sent

    def carries(self, stage: int) -> int:
        """Returns the bytes that go from microbatch to microbatch, and from replica to replica."""
        return num_bytes(specs_of(self._machine.stages[stage].carry))

    def sums(self, stage: int, place: int) -> int:
        """Returns the bytes of summed gradients on a device of a stage's home."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        return _of_place(passes.accumulator_specs, passes.accumulator_places, place)

    def values(self, kind: Kind[Any], stage: int, place: int, microbatch: int = 0) -> int:
        """Returns the bytes of a kind of value on a device of a stage's home.

        The `OUTPUTS` of stage -1 are the pipeline's inputs.
        """
        machine = self._machine
        if stage < 0:
            first = machine.traced[0]
            return _of_place([*map(first.spec, first.inputs)], machine.input_places(0), place)
        mode = self._modes[stage, microbatch]
        specs, places = machine.specs(kind, stage, mode), machine.places(kind, stage, mode)
        return _of_place(specs, places, place)

    def handed_on(self, action: Action) -> Mapping[tuple[int, int], int]:
        """Returns the bytes that an action sends to the next home or, backward, the previous one.

        The keys are two device indices: one of its home, one of the other.
        """
        machine, stage = self._machine, action.stage
        sent = collections.Counter[tuple[int, int]]()
        if action.kind == "F" and stage + 1 < len(machine.stages):
            specs, targets = machine.specs(OUTPUTS, stage), machine.input_places(stage + 1)
            sources = machine.places(OUTPUTS, stage)
        elif action.kind in ("B", "I") and stage:
            specs, sources = machine.specs(GRADS, stage), machine.input_places(stage)
            targets = machine.places(OUTPUTS, stage - 1)
        else:
            return sent
        for spec, source, target in zip(specs, sources, targets, strict=True):
            sent[source, target] += 0 if spec is None else num_bytes([spec])
        return sent

    def crossing(self, action: Action) -> dict[tuple[int, int], int]:
        """Returns the bytes sent from device to device of a home while an action computes.

        The keys are the indices of sender and receiver.
        """
        traced = self._machine.traced[action.stage]
        crossing: dict[tuple[int, int], int] = {}
        sent: set[tuple[str, int]] = set()
        for tensor, node in traced.cut.uses(self._nodes(action)):
            source, target = traced.place(tensor), traced.place(f"{node}:0")
            # A tensor that several nodes of a device take is sent once.
            if source != target and (tensor, target) not in sent:
                sent.add((tensor, target))
                size = num_bytes([traced.spec(tensor)])
                crossing[source, target] = crossing.get((source, target), 0) + size
        return crossing

    def _nodes(self, action: Action) -> set[str]:
        """Returns the nodes of its stage's graph that an action computes."""
        stage = action.stage
        mode = self._modes[stage, action.microbatch]
        passes = self._machine.passes(stage, mode if action.kind in "FR" else mode.backward)
        return passes.cuts.nodes(action.kind, stage == 0)

    def kept_names(self, stage: int) -> tuple[TracedStage, list[str]]:
        """Returns a traced stage, and the tensors that its first forward pass keeps."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        return self._machine.traced[stage], passes.cuts.kept


def _of_place(specs: Sequence[tf.TensorSpec | None], places: Sequence[int], place: int) -> int:
    return num_bytes(
        [s for s, number in zip(specs, places, strict=True) if number == place and s is not None]
    )
