"""Bytes that a device of a plan holds and needs, action by action."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.plan.figures import Figures
from pipemesh.plan.remat import FULL, NONE, TWICE
from pipemesh.plan.stage_costs import Stages


def device_memory(stages: Stages, figures: Figures, place: int) -> float:
    """The most bytes of one device of a place at once.

    Weights and the optimizer's share are there all the time; sums of gradients from the first `B`
    or `W` of a stage on, which makes them as it lets go of what was kept. Beside what is held an
    action needs something while it runs, and so does the update after the last one.

    Args:
        stages: of the plan.
        figures: of the layers.
        place: along `layers`.
    """
    own = {
        stage: _StageMemory(stages, stage)
        for stage, owner in enumerate(stages.table.stage_devices)
        if owner == place
    }
    apart = stages.table.recomputed()
    # By stage, kind, mode and whether there are no sums: what is needed, and what is left.
    known: dict[tuple[int, str, str, bool], tuple[float, float]] = {}
    summed: set[int] = set()
    held = most = 0.0
    for action in stages.table.rows[place]:
        stage, kind = action.stage, action.kind
        pair = stage, action.microbatch
        mode = stages.modes[pair]
        if pair in apart:
            # An `R` of the table has computed all of it before the backward pass begins.
            mode = NONE if kind in "BIW" else FULL
        is_first = stage not in summed
        if (key := (stage, kind, mode, is_first)) not in known:
            of = own[stage]
            known[key] = of.needs(kind, mode, is_first), of.leaves(kind, mode)
        needed, left = known[key]
        most = max(most, held + needed)
        held += left
        if kind in "BW" and is_first:
            summed.add(stage)
            held += own[stage].weights
    weights = sum(of.weights for of in own.values())
    states = weights * (1 + stages.cast + figures.optimizer / stages.replicas)
    # Each replica updates its share.
    update = weights * (1 + (figures.update_memory - 1) / stages.replicas)
    return states + max(most, update)


class _StageMemory:
    """What a microbatch leaves of a stage on one device, and what its actions need.

    Args:
        stages: of the plan.
        stage: which one.
    """

    def __init__(self, stages: Stages, stage: int) -> None:
        layers, rows = stages.layers[stage], stages.rows
        self._sums = [layer.parameter_bytes / stages.shared(layer) for layer in layers]
        self._kept = [layer.holds(rows, stages.shared(layer)) for layer in layers]
        self._pending = [layer.holds(rows, stages.shared(layer), True) for layer in layers]
        self._working = [
            layer.working.at(rows) / stages.shared(layer) if layer.working else 0.0
            for layer in layers
        ]
        self._given = stages.given(stage)
        self.weights = stages.weights(stage)

    def _left(self, kind: str, mode: str) -> float:
        """Bytes of a microbatch that are held after its `F`, `R` or `I`."""
        if kind == "R" or (kind == "F" and mode == NONE):
            return sum(self._kept)
        if kind == "F":
            return self._given
        # Half of what a `W` needs are gradients, and half is what layers computed forward, which a
        # `W` that computes again does not need.
        return self._given + sum(self._pending) / 2 if mode == TWICE else sum(self._pending)

    def leaves(self, kind: str, mode: str) -> float:
        """By how much more is held after an action, sums of gradients left aside.

        Args:
            kind: of the action.
            mode: what its backward pass computes again.
        """
        before = {"F": 0.0, "W": self._left("I", mode)}.get(kind, self._left("F", mode))
        return (self._left(kind, mode) if kind in "FRI" else 0.0) - before

    def needs(self, kind: str, mode: str, is_first: bool) -> float:
        """Bytes beside what is held when an action begins.

        Args:
            kind: of the action.
            mode: what its backward pass computes again.
            is_first: whether there are no sums of the stage's gradients yet.
        """
        # Without gradients of weights; where nothing is added to them, they are the sums.
        less = [max(0.0, w - s) for w, s in zip(self._working, self._sums, strict=True)]
        # While an action computes its stage again it has all of that, too.
        again = max(0.0, sum(self._kept) - self._left("F", mode))
        if kind in "FR":
            return max(0.0, self.leaves(kind, mode)) + max(less)
        if kind == "I":
            pairs = zip(self._pending, self._kept, strict=True)
            return again + self._backward([], [max(0.0, p - k) for p, k in pairs], less)
        freed = self._kept if kind == "B" else self._pending
        if kind == "W":
            again = max(0.0, sum(self._pending) - self._left("I", mode)) if mode == TWICE else 0.0
        made, working = (self._sums, less) if is_first else ([], self._working)
        return again + self._backward(freed, made, working)

    @staticmethod
    def _backward(freed: Sequence[float], made: Sequence[float], working: Sequence[float]) -> float:
        """The most while a pass goes from the last layer to the first one.

        Products of a layer wait while the one before it begins, so two at a time are at work, and
        nothing of both is let go of.

        Args:
            freed: bytes that each layer lets go of when it is done; none for nothing.
            made: bytes that it adds, and that stay; none for nothing.
            working: bytes that it needs meanwhile.
        """
        most = changed = 0.0
        for i in reversed(range(len(working))):
            grown = made[i] if made else 0.0
            most = max(most, changed + grown + sum(working[max(0, i - 1) : i + 1]))
            changed += grown - (freed[i] if freed else 0.0)
        return most
