"""Changes of a plan, each with what a step takes under it."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence

from pipemesh.errors import PipemeshError
from pipemesh.plan import Figures, Plan, Prediction, SearchSpace, predict
from pipemesh.plan.plan import divisors
from pipemesh.plan.remat import Remat
from pipemesh.plan.search import DATA, SCHEDULES, Split, with_better_cuts
from pipemesh.plan.stages import evenly_cut

# How much smaller or larger microbatches may be of which nothing was measured: what an action
# takes is then only known to be about as long as its rows are many.
_FARTHEST = 4
LEAST, LEAST_SUPPOSED = 0.02, 0.05
"""The share of a step that a change must help by to be named: below, steps differ in any case; and
below the second, what is supposed is as likely wrong."""
# For moving layers over cuts.
_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a plan.

    Attributes:
        kind: of what: `microbatches`, `schedule`, `cuts`, `remat` or `mesh`.
        values: of the plan that are otherwise, as in `Plan.to_values`.
        prediction: of a step.
        supposed: what was not measured and is supposed; "" if nothing is.
    """

    kind: str
    values: Mapping[str, str]
    prediction: Prediction
    supposed: str = ""

    @property
    def words(self) -> list[str]:
        """What to give to a training, each flag as a shell takes it."""
        return [
            shlex.quote(f"--{'mesh_shape' if name == 'mesh' else name}={text}")
            for name, text in self.values.items()
        ]

    @property
    def flags(self) -> str:
        """All of them, as a shell takes them."""
        return " ".join(self.words)


def changes(
    plan: Plan,
    figures: Figures,
    batch: int,
    *,
    memory: float | None = None,
    knows_rows: bool = True,
    knows_halves: bool = True,
    knows_layers: bool = True,
    knows_links: bool = True,
    cuts_given: bool = True,
) -> list[Change]:
    """All changes of one thing that can be had, shortest step first.

    Microbatches: all numbers that divide the batch. Schedules: those of the search of plans, with
    layers cut anew where they have other stages. Cuts: stages of equal seconds, and layers moved
    from there as long as that helps. Remat: none. Mesh: fewer stages, and more replicas.

    Args:
        plan: with boundaries, that the step ran under.
        figures: by which it takes as long as it did (`corrected`).
        batch: rows.
        memory: bytes of a device; what needs more is left out. None for no limit.
        knows_rows: whether figures say how times depend on rows.
        knows_halves: whether they say what an `I` and a `W` take.
        knows_layers: whether they are of single layers; of whole stages nothing can be cut anew.
        knows_links: whether they say how long sums of replicas take.
        cuts_given: whether the training was given its boundaries, so that others have to be given
            even where there is one stage.

    Raises:
        PlanError: nothing can be said of such a plan.
    """
    found: list[Change] = []
    for kind, other in _others(plan, figures, batch, knows_rows, knows_layers, knows_links):
        try:
            prediction = predict(other, figures, batch, parts=False)
        except PipemeshError:
            # The batch, or the layers, cannot be cut so.
            continue
        if memory is not None and max(prediction.memory) > memory:
            continue
        supposed: list[str] = []
        if kind == "microbatches" and not knows_rows:
            supposed.append("actions take as long as their rows are many")
        halves = any(action.kind in "IW" for row in other.table.rows for action in row)
        if kind == "schedule" and halves and not knows_halves:
            supposed.append("halves of a backward pass do as much as the whole")
        if other.num_stages > plan.num_stages and not knows_rows:
            supposed.append("parts of a stage take no longer than the stage")
        if kind == "remat" and not knows_rows:
            supposed.append("what is computed again takes what its flops say")
        values = {name: now for name, (_, now) in plan.changes(other).items()}
        if other.num_stages == 1 and not cuts_given:
            values.pop("boundaries", None)
        if any(each.values == values for each in found):
            continue
        found.append(Change(kind, values, prediction, "; ".join(supposed)))
    return sorted(found, key=lambda each: each.prediction.seconds)


def best(found: Sequence[Change], now: float) -> Change:
    """The change to name.

    What rests on measurements alone goes before what something is supposed of, if it helps at least
    half as much. Of those that come within 2% of the best, the one with fewest flags is named.

    Args:
        found: shortest step first, one at least.
        now: seconds of a step as it is.
    """
    most = now - found[0].prediction.seconds
    known = [e for e in found if not e.supposed and now - e.prediction.seconds >= most / 2 > 0]
    left = known or found
    until = left[0].prediction.seconds + LEAST * now
    near = [each for each in left if each.prediction.seconds <= until]

    def key(each: Change) -> tuple[int, int, float]:
        prediction = each.prediction
        return len(each.values), round(1e3 * prediction.seconds / now), max(prediction.memory)

    return min(near, key=key)


def least(change: Change) -> float:
    """The share of a step that a change has to help by to be named."""
    return LEAST_SUPPOSED if change.supposed else LEAST


def best_of_each(found: Sequence[Change]) -> list[Change]:
    """The first of each kind, in their order.

    Args:
        found: shortest step first.
    """
    kinds: dict[str, Change] = {}
    for each in found:
        kinds.setdefault(each.kind, each)
    return list(kinds.values())


def _others(
    plan: Plan,
    figures: Figures,
    batch: int,
    knows_rows: bool,
    knows_layers: bool,
    knows_links: bool,
) -> Iterator[tuple[str, Plan]]:
    for number in divisors(max(1, batch // plan.num_replicas)):
        times = max(number / plan.num_microbatches, plan.num_microbatches / number)
        if number != plan.num_microbatches and (knows_rows or times <= _FARTHEST):
            yield from _made("microbatches", plan, num_microbatches=number)
    if plan.mesh.num_stages > 1:
        for name in SCHEDULES:
            if name != plan.schedule:
                yield from _scheduled(plan, name, figures, batch, knows_layers)
    if knows_layers and plan.num_stages > 1:
        yield from _recut(plan, figures, batch)
    if not (plan.remat.is_custom or plan.remat.is_none):
        yield from _made("remat", plan, remat=Remat.NONE)
    if knows_layers and knows_links:
        yield from _meshes(plan, figures, batch)


def _made(kind: str, plan: Plan, **values: object) -> Iterator[tuple[str, Plan]]:
    try:
        yield kind, dataclasses.replace(plan, **values)
    except PipemeshError:
        # No such table for so many homes and microbatches.
        return


def _scheduled(
    plan: Plan, name: str, figures: Figures, batch: int, knows_layers: bool
) -> Iterator[tuple[str, Plan]]:
    for _, other in _made("schedule", plan, schedule=name, boundaries=None):
        if other.table.stage_devices == plan.table.stage_devices:
            yield "schedule", dataclasses.replace(other, boundaries=plan.boundaries)
        elif knows_layers and other.num_stages <= len(figures.layers):
            yield "schedule", evenly_cut(other, figures, batch)


def _recut(plan: Plan, figures: Figures, batch: int) -> Iterator[tuple[str, Plan]]:
    space = SearchSpace(plan.mesh.num_devices, batch)
    end = time.monotonic() + _SECONDS
    for begin in dict.fromkeys((evenly_cut(plan, figures, batch), plan)):
        best = predict(begin, figures, batch, parts=False)
        better = with_better_cuts(best, figures, space, end).plan
        if better.boundaries != plan.boundaries:
            yield "cuts", better


def _meshes(plan: Plan, figures: Figures, batch: int) -> Iterator[tuple[str, Plan]]:
    """As many devices, with fewer stages."""
    places, replicas = plan.mesh.num_stages, plan.num_replicas
    group = plan.mesh.num_devices // places // replicas
    axes = {DATA} if plan.num_replicas > 1 else set[str]()
    if not isinstance(plan.schedule, str) or group > 1 or {*_axes(plan)} - axes:
        # Axes of other names, or layers that several devices share, are someone's own choice.
        return
    fixed = {
        name: text
        for name, text in plan.to_values().items()
        if name not in ("mesh", "layout", "boundaries", "schedule", "num_microbatches", "remat")
    }
    space = SearchSpace(plan.mesh.num_devices, batch, fixed=fixed)
    for fewer in divisors(places):
        if fewer == places:
            continue
        schedule = plan.schedule if fewer > 1 else "1f1b"
        more = replicas * places // fewer
        # As many as now, and as large as now.
        for number in {plan.num_microbatches, max(1, plan.num_microbatches * fewer // places)}:
            candidate = Split(fewer, more, 1, schedule, number, plan.remat)
            try:
                yield "mesh", evenly_cut(candidate.plan(figures, space), figures, batch)
            except PipemeshError:
                # No such table for so many homes and microbatches.
                continue


def _axes(plan: Plan) -> list[str]:
    return [name for name, _ in plan.mesh.axes if name != "layers"]
