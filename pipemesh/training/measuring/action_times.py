"""What actions of a model's layers take, of steps that are run several times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipemesh.schedule import Action
from pipemesh.training.measuring.one_core import one_core
from pipemesh.training.measuring.timed_step import TimedStep

ROUNDS = 20
"""How often each step is run."""

# What a layer takes is at least this share of what its action takes.
_LEAST = 0.1


class ActionTimes:
    """What actions of steps took that are run in turn.

    Args:
        steps: clocked, with a layer a stage.
        rows: of a microbatch of each.
        number: of layers.
        whole: a clocked step with all layers in one stage.
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
        """Runs each step once, in turn: other work makes all of them longer alike."""
        for step, size in zip(self._steps, self._rows, strict=True):
            step.run()
            self._before.append(step.before)
            self._after.append(step.after)
            times = _later(step)
            # Where something is computed again that alone counts: there the others have less to do.
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
        """Seconds of a step until its first action."""
        return statistics.median(self._before)

    @property
    def after(self) -> float:
        """Seconds of a step after its last action."""
        return statistics.median(self._after)

    def besides(self, rows: int) -> float:
        """What an action takes beside its layers: one for all of them takes so much less than many.

        Args:
            rows: of the step in which all layers are one stage.
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
        """For each layer, by kind of action and rows, the seconds of the layer itself.

        Args:
            beside: what an action takes besides.
        """

        def without(times: list[float]) -> float:
            took = usual(times)
            return max(took - beside, _LEAST * took)

        found = [
            {kind: {size: without(times) for size, times in of.items()} for kind, of in own.items()}
            for own in self._layers
        ]
        # A first layer without weights has nothing to do in a backward pass.
        for own in found:
            for kind in "BR":
                own.setdefault(kind, dict.fromkeys(own["F"], 0.0))
        return found


def _later(step: TimedStep) -> list[tuple[Action, float]]:
    """Actions from the second microbatch on, where gradients are added to what is there."""
    return [(action, took) for action, took in step.durations().items() if action.microbatch]


def times_of(
    steps: Sequence[TimedStep], rows: Sequence[int], number: int, whole: TimedStep
) -> ActionTimes:
    """The times of steps, each of which is run `ROUNDS` times.

    Args:
        steps: as those of `ActionTimes`; so are the others.
        rows: of a microbatch of each.
        number: of layers.
        whole: a step with all layers in one stage.
    """
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
    """The times of steps on one core: what all cores compute for actions otherwise.

    Args:
        steps: as those of `ActionTimes`; so are the others.
        rows: of a microbatch of each.
        number: of layers.
        whole: a step with all layers in one stage.

    Returns:
        The times, or None where a process cannot be kept on one core.
    """
    with one_core() as is_one:
        if not is_one:
            return None
        return times_of(steps, rows, number, whole)


def in_turn(rounds: Sequence[Sequence[float]]) -> list[float]:
    """What several things take that are done in turn, for some rounds.

    A machine that becomes slower for a while makes all of a round longer alike; so each is a share
    of its round first.

    Args:
        rounds: of each what each thing took.

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
    """What something takes, of several times: the mean of the shorter half.

    Other work on a machine makes it longer, and nothing makes it shorter; the shortest time of all
    is luck.

    Args:
        seconds: of each time.

    Example:
        >>> usual([3.0, 1.0, 9.0, 2.0, 7.0])
        2.0
    """
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])
