"""Bytes that a device of a plan holds and needs, action by action."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.plan.figures import Figures
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
    summed: set[int] = set()
    held = most = 0.0
    for action in stages.table.rows[place]:
        of, is_first = own[action.stage], action.stage not in summed
        most = max(most, held + of.needs(action.kind, is_first))
        held += of.leaves(action.kind)
        if action.kind in "BW" and is_first:
            summed.add(action.stage)
            held += of.weights
    weights = sum(of.weights for of in own.values())
    states = weights * (1 + figures.optimizer / stages.replicas)
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
        sums = [layer.parameter_bytes / stages.shared(layer) for layer in layers]
        kept = [layer.holds(rows, stages.shared(layer)) for layer in layers]
        pending = [layer.holds(rows, stages.shared(layer), True) for layer in layers]
        working = [
            layer.working.at(rows) / stages.shared(layer) if layer.working else 0.0
            for layer in layers
        ]
        self.weights = stages.weights(stage)
        whole = sum(kept)
        held = stages.given(stage) if stages.again else whole
        # While an action computes its stage again it has all of that, too.
        again = max(0.0, whole - held)
        self._leaves = {"F": held, "B": -held, "I": sum(pending) - held, "W": -sum(pending)}
        grown = [max(0.0, p - k) for p, k in zip(pending, kept, strict=True)]
        none = [0.0] * len(layers)
        # Without gradients of weights; where nothing is added to them, they are the sums.
        less = [max(0.0, w - s) for w, s in zip(working, sums, strict=True)]
        self._needs = {
            "F": held + max(less),
            "B": again + self._backward(kept, none, working),
            "I": again + self._backward(none, grown, less),
            "W": self._backward(pending, none, working),
        }
        self._first_needs = self._needs | {
            "B": again + self._backward(kept, sums, less),
            "W": self._backward(pending, sums, less),
        }

    def needs(self, kind: str, is_first: bool) -> float:
        """Bytes beside what is held when an action begins.

        Args:
            kind: of the action.
            is_first: whether there are no sums of the stage's gradients yet.
        """
        return (self._first_needs if is_first else self._needs).get(kind, 0.0)

    def leaves(self, kind: str) -> float:
        """By how much more is held after an action, sums of gradients left aside."""
        return self._leaves.get(kind, 0.0)

    @staticmethod
    def _backward(freed: Sequence[float], made: Sequence[float], working: Sequence[float]) -> float:
        """The most while a pass goes from the last layer to the first one.

        Products of a layer wait while the one before it begins, so two at a time are at work, and
        nothing of both is let go of.

        Args:
            freed: bytes that each layer lets go of when it is done.
            made: bytes that it adds, and that stay.
            working: bytes that it needs meanwhile.
        """
        most = changed = 0.0
        for i in reversed(range(len(freed))):
            most = max(most, changed + made[i] + sum(working[max(0, i - 1) : i + 1]))
            changed += made[i] - freed[i]
        return most
