"""Times of actions and layers, from steps that run several times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipemesh.schedule import Action
from pipemesh.training.measuring.one_core import one_core
from pipemesh.training.measuring.timed_step import TimedStep

ROUNDS = 20
"""How often each step is run."""

# Lower bound of a layer's share of its action's time.
_LEAST = 0.1


class ActionTimes:
    """The times of actions in several steps that run in turn.

    Args:
        steps: steps with a clock, each layer a stage.
        rows: number of examples in a microbatch, for each step.
        number: number of layers.
        whole: a step with a clock and all layers in one stage.
    """

    def __init__(
        self,
        steps: Sequence[TimedStep],
        rows: Sequence[int],
        number: int,
        whole: TimedStep,
    ) -> None:
        self._steps, self._rows, self._whole = steps, rows, whole
        self._layers: list[dict[str, dict[int, list[float]]]] = [{} for _ in range(number)]
        self._together: dict[str, list[float]] = {}
        self._before: list[float] = []
        self._after: list[float] = []

    def add(self) -> None:
        """Runs each step once, in turn, so that other load slows all of them equally."""
        for step, size in zip(self._steps, self._rows, strict=True):
            step.run()
            self._before.append(step.before)
            self._after.append(step.after)
            times = _later(step)
            # With recomputation only R is counted: it takes work off the other actions.
            again = any(action.kind == "R" for action, _ in times)
            for action, took in times:
                if again and action.kind != "R":
                    continue
                own = self._layers[action.stage].setdefault(action.kind, {})
                own.setdefault(size, []).append(took)
        self._whole.run()
        for action, took in _later(self._whole):
            self._together.setdefault(action.kind, []).append(took)

    @property
    def before(self) -> float:
        """Returns the seconds of a step until its first action."""
        return statistics.median(self._before)

    @property
    def after(self) -> float:
        """Returns the seconds of a step after its last action."""
        return statistics.median(self._after)

    def besides(self, rows: int) -> float:
        """Returns the overhead of an action, from one action of all layers against one for each
        layer.
        """
        if len(self._layers) == 1:
            return 0.0
        every = self.of_layers(0.0)
        more = [
            (sum(own[kind][rows] for own in every) - usual(self._together[kind])) / (len(every) - 1)
            for kind in "FB"
        ]
        return max(0.0, min(more))

    def of_layers(self, beside: float) -> list[dict[str, dict[int, float]]]:
        """Returns each layer's seconds without `beside`, by kind of action and rows."""

        def without(times: list[float]) -> float:
            took = usual(times)
            return max(took - beside, _LEAST * took)

        found = [
            {kind: {size: without(times) for size, times in of.items()} for kind, of in own.items()}
            for own in self._layers
        ]
        # A first layer without weights has no backward pass.
        for own in found:
            for kind in "BR":
                own.setdefault(kind, dict.fromkeys(own["F"], 0.0))
        return found


def _later(step: TimedStep) -> list[tuple[Action, float]]:
    """Returns the actions from the second microbatch on, which add to existing gradients."""
    return [(action, took) for action, took in step.durations().items() if action.microbatch]


def times_of(
    steps: Sequence[TimedStep], rows: Sequence[int], number: int, whole: TimedStep
) -> ActionTimes:
    """Returns the times of steps, each of which runs `ROUNDS` times."""
    found = ActionTimes(steps, rows, number, whole)
    for _ in range(ROUNDS):
        found.add()
    return found


def on_one_core(
    steps: Sequence[TimedStep],
    rows: Sequence[int],
    number: int,
    whole: TimedStep,
) -> ActionTimes | None:
    """Returns the times of steps on one core, or None if the process cannot be pinned.

    On one core, time is the work that all cores would share.
    """
    with one_core() as is_one:
        if not is_one:
            return None
        return times_of(steps, rows, number, whole)


def in_turn(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns the typical time of each of several things that run in turn, for some rounds.

    A slow phase of the machine lengthens a whole round. So times are first divided by their
    round's.

    Example:
        >>> in_turn([(1.0, 3.0), (2.0, 6.0), (1.0, 3.0)])
        [1.0, 3.0]
    """
    totals = [sum(times) for times in rounds]
    whole = statistics.median(totals)
    return [
        whole * statistics.median(took / total for took, total in zip(times, totals, strict=True))
        for times in zip(*rounds, strict=True)
    ]


def usual(seconds: Sequence[float]) -> float:
    """Returns the typical time among several: the mean of the shorter half.

    Other load only lengthens times, and the shortest time alone is luck.

    Example:
        >>> usual([3.0, 1.0, 9.0, 2.0, 7.0])
        2.0
    """
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])
