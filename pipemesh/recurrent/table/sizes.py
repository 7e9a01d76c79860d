"""What a run holds and sends, in bytes."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.table.kinds import Kind
from pipemesh.recurrent.table.machine import Machine
from pipemesh.schedule import Action


class Sizes:
    """Bytes on the devices of stages, known before anything runs.

    Args:
        machine: of the run.
        modes: of remat, by stage and microbatch.
    """

    def __init__(self, machine: Machine, modes: Mapping[tuple[int, int], Mode]) -> None:
        self._machine = machine
        self._modes = modes

    def weights(self, stage: int, place: int) -> int:
        """What a device of a stage's home, by its number, holds of weights."""
        held, group = self._machine.stages[stage], self._machine.stages[stage].of_home.group
        return _of_place(specs_of(held.theta), held.theta_places, place % group)

    def weights_sent(self, stage: int) -> Mapping[tuple[int, int], int]:
        """What of a stage's weights goes from device to device of its home, by their numbers."""
        held, sent = self._machine.stages[stage], collections.Counter[tuple[int, int]]()
        home = held.of_home
        for spec, owner in zip(specs_of(held.theta), held.owners, strict=True):
            for place in range(owner % home.group, len(home), home.group):
                sent[owner, place] += num_bytes([spec])
        return sent

    def sums_sent(self, stage: int) -> Mapping[tuple[int, int], int]:
        """What of the sums of weights' gradients goes from device to device of the home."""
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
        """What a stage hands from microbatch to microbatch, and from replica to replica."""
        return num_bytes(specs_of(self._machine.stages[stage].carry))

    def sums(self, stage: int, place: int) -> int:
        """What a device of a stage's home, by its number, holds of sums of weights' gradients."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        return _of_place(passes.accumulator_specs, passes.accumulator_places, place)

    def values(self, kind: Kind[Any], stage: int, place: int, microbatch: int = 0) -> int:
        """What a device of a stage's home, by its number, leaves of a kind.

        The `OUTPUTS` of stage -1 are the pipeline's inputs.
        """
        machine = self._machine
        if stage < 0:
            first = machine.traced[0]
            return _of_place([*map(first.spec, first.inputs)], machine.input_places(0), place)
        mode = self._modes[stage, microbatch]
        specs, places = machine.specs(kind, stage, mode), machine.places(kind, stage, mode)
        return _of_place(specs, places, place)

    def crossing(self, action: Action) -> dict[tuple[int, int], int]:
        """What goes from device to device of a home while an action computes.

        Returns:
            Bytes by the numbers of two devices, from where and to where.
        """
        stage = action.stage
        traced = self._machine.traced[stage]
        cuts = self._machine.passes(stage, self._modes[stage, action.microbatch]).cuts
        found: dict[tuple[int, int], int] = {}
        sent: set[tuple[str, int]] = set()
        for tensor, node in traced.cut.uses(cuts.nodes(action.kind, stage == 0)):
            source, target = traced.place(tensor), traced.place(f"{node}:0")
            # Of what several nodes of a device take, it gets one.
            if source != target and (tensor, target) not in sent:
                sent.add((tensor, target))
                size = num_bytes([traced.spec(tensor)])
                found[source, target] = found.get((source, target), 0) + size
        return found

    def kept_names(self, stage: int) -> tuple[TracedStage, list[str]]:
        """A stage, and the tensors that its forward pass of the first microbatch leaves."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        return self._machine.traced[stage], passes.cuts.kept


def _of_place(specs: Sequence[tf.TensorSpec | None], places: Sequence[int], place: int) -> int:
    mine = zip(specs, places, strict=True)
    return num_bytes([spec for spec, found in mine if found == place and spec is not None])
