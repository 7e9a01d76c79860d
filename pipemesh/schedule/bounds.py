"""A lower bound of the makespan that no schedule of the same work can beat.

Fixed are costs, the device of each stage, the number of microbatches, and the number of (stage,
microbatch) pairs that a device may hold. Free are the order of actions on each device, and for
each backward if it is whole or split. `lower_bound` is the largest of the six bounds proved
here.

Let `f`, `i`, `w`, `b` be the durations of a stage. Two facts hold for every schedule. A gradient
needs at least `g = min(i, b)` to pass a stage, and a pair keeps its device busy for at least `f +
r`, `r = min(b, i + w)`. `arrive(s)` is the sum of the forwards and transfers before stage `s`: no
action of stage `s` starts earlier. `return(s)` is when the first gradient can arrive at `s`: all
forwards, then `g` and transfers of all later stages. Take a device `d` with lowest stage `a`,
highest stage `z`, `N` pairs and room for `K` of them (at most `N`).

1. **Path.** One microbatch goes up and comes back to stage 0, which takes `return(0) + r(0)`.
2. **Start.** Before `return(z)` the device can only do forwards, none before `arrive(a)`, and no
   more than `K`, since nothing is given back before. If the `K` longest forwards take `P`, the
   device is idle for at least `idle = max(arrive(a), return(z) - P)` before `return(z)`, or
   before its first action.
3. **Load.** All of its work comes on top of that: `idle + sum(f + r)`.
4. **Last gradient.** Take the last action of stage `a` that makes a gradient. Every forward and
   every other gradient of this device came before, because each microbatch passes stage `a` last
   on its way back. Of the pairs at most `K` are still held at its end, so the rest have cost `r`
   and not only `g`. After it the gradient goes on to stage 0 and is finished there. So the
   makespan is at least `idle + sum(f + g) + (the N - K smallest of r - g) + (g and transfers of
   the stages below a, with r in place of g for stage 0)`.
5. **Room.** A pair of stage `s` is held for at least `h(s) = f(s) + (the way up from s and back)
   + r(s)`. The sum over all pairs is the integral of what the device holds, which is at most `K`
   from `arrive(a)` to the end. It cannot be `K` at once: forwards start one after the other, so
   `K (K - 1) / 2` times the shortest forward is lost at the start, and as much with the shortest
   action that ends a backward at the end. Both ends do not overlap, because all pairs have to be
   computed in between. So `K (makespan - arrive(a)) >= sum(h) + K (K - 1) / 2 * (shortest f +
   shortest end)`.

6. **Last forward.** Let `t` be the end of the last forward of stage `z` on this device, of
   microbatch `m`. It is the last forward of the device, because each microbatch passes stage `z`
   last on its way up. At `t` at most `K` pairs are held, so the others are finished. If there are
   others (`N > K`), a gradient has come before `t`, and with it the idle time of 2; else only
   `arrive(a)` is idle for certain. So `t` is at least that, all forwards, and the `N - K` smallest
   `r` of other microbatches than `m`. After `t` the gradient of `m` has to come back to stage `z`
   (the way up from there and back), then go on to stage 0 and be finished there; and before it is
   back, no pair of `m` has begun its backward, so this device still has all of these to do. The
   makespan is at least `t + (the way up and back) + max(the way down, sum(r) over its stages)`.

Without backward actions only the path and the load with what comes before and after it are left.

**Slices.** With `Q` slices, costs are those of a slice and `N` counts slices; a schedule of
slices is one of so many microbatches that also keeps their order, so all of the above holds.
Besides, no gradient exists before the last stage has done all `Q` forwards of a microbatch, which
makes every `return(s)` later by `Q - 1` of them; the path ends with the `Q - 1` gradients that
stage 0 still has to make; and slice `k` is held for `Q - 1 - k` forwards of the last stage and as
many gradients of its own longer than the last slice. In 6 the last slice is the first to come
back, and all `Q` pairs of each stage are still to do; on its way down, stage 0 has `Q - 1` more.

**Recomputation.** A device that recomputes gives memory back before the first gradient, and can
recompute before it, too. So for such a device `P` is all forwards and recomputations, none of the
pairs has to be finished in 4, the recomputations come on top in 3 and 4 (each before its
gradient), and in 5 a recomputed pair counts only with its own actions, and nothing is lost at the
ends. Bound 6 is left out.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from pipemesh.schedule.checks import check_counts, check_indices, check_type
from pipemesh.schedule.costs import Costs, StageCosts


def lower_bound(
    costs: Costs,
    stage_devices: Sequence[int],
    num_microbatches: int,
    memory_limits: Sequence[int] | None = None,
    *,
    forward_only: bool = False,
    num_slices: int = 1,
    recomputed: Sequence[int] | None = None,
) -> float:
    """Returns a time that no schedule of this work is shorter than.

    Args:
        costs: durations and transfer times, one number or one a stage.
        stage_devices: for each stage its device.
        num_microbatches: number of microbatches, at least 1.
        memory_limits: for each device the most (stage, microbatch) pairs that it may hold, in the
            sense of `Timeline.peak_activations`; None for no limit.
        forward_only: True if there is no backward pass.
        num_slices: number of slices of every sequence; `costs` are those of a slice.
        recomputed: for each stage the number of its pairs that an `R` recomputes; None for none.

    Returns:
        The bound, in the unit of the costs; the module has the proof.

    Raises:
        ScheduleError: an argument has another type, length or range.

    Example:
        >>> lower_bound(Costs(), (0, 1, 2, 3), 8)
        27.0
        >>> lower_bound(Costs(), (0, 1, 2, 3), 8, memory_limits=[2, 2, 2, 2])
        37.0
    """
    num_microbatches, num_slices = check_counts(
        num_microbatches=num_microbatches, num_slices=num_slices
    )
    stage_devices = check_indices("stage_devices", stage_devices)
    stage_costs = check_type("costs", costs, Costs).per_stage(len(stage_devices))
    num_devices = max(stage_devices) + 1
    if memory_limits is not None:
        memory_limits = check_indices("memory_limits", memory_limits, num_devices)
    if recomputed is None:
        recomputed = [0] * len(stage_devices)
    again = check_indices("recomputed", recomputed, len(stage_devices), "stage")
    ways = _Ways.of(stage_costs, stage_devices, num_slices)
    num_pieces = num_microbatches * num_slices
    devices = range(num_devices)
    stages = [[s for s, home in enumerate(stage_devices) if home == device] for device in devices]
    if forward_only:
        return max(
            ways.arrive[owned[0]]
            + num_pieces * sum(ways.forward[s] for s in owned)
            + (
                ways.arrive[-1]
                + ways.forward[-1]
                - ways.arrive[owned[-1]]
                - ways.forward[owned[-1]]
            )
            for owned in stages
            if owned
        )
    bounds = [ways.come_back[0] + (num_slices - 1) * ways.grad[0] + ways.release[0]]
    for device, owned in enumerate(stages):
        if owned:
            pairs = len(owned) * num_pieces
            room = pairs if memory_limits is None else min(pairs, memory_limits[device])
            if any(again[s] for s in owned):
                bounds += _of_recomputing(ways, owned, num_pieces, max(1, room), again)
            else:
                bounds += _of_device(ways, owned, num_pieces, max(1, room))
    return max(bounds)


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The quantities of the proofs, one value a stage."""

    forward: tuple[float, ...]  # `f`
    grad: tuple[float, ...]  # `g`, the least time in which a gradient passes
    release: tuple[float, ...]  # `r`, the least total time of a backward
    end: tuple[float, ...]  # least duration of the action that ends a backward
    arrive: tuple[float, ...]  # earliest arrival of the first microbatch
    come_back: tuple[float, ...]  # earliest arrival of the first gradient
    recompute: tuple[float, ...]
    num_slices: int

    @classmethod
    def of(cls, costs: StageCosts, stage_devices: Sequence[int], num_slices: int) -> _Ways:
        """Walks up and back."""
        parts = list(
            zip(costs.forward, costs.backward, costs.input_grad, costs.weight_grad, strict=True)
        )
        grad = tuple(min(b, i) for _, b, i, _ in parts)
        last = len(parts) - 1
        lag = [
            costs.transfer[s] if stage_devices[s] != stage_devices[s + 1] else 0.0
            for s in range(last)
        ]
        arrive = [0.0]
        for s in range(last):
            arrive.append(arrive[s] + costs.forward[s] + lag[s])
        come_back = [arrive[last] + num_slices * costs.forward[last]]
        for s in reversed(range(last)):
            come_back.append(come_back[-1] + grad[s + 1] + lag[s])
        return cls(
            costs.forward,
            grad,
            tuple(min(b, i + w) for _, b, i, w in parts),
            tuple(min(b, w) for _, b, _, w in parts),
            tuple(arrive),
            tuple(reversed(come_back)),
            costs.recompute,
            num_slices,
        )

    def shortest_hold(self, stage: int) -> float:
        """Returns the least time that the last slice is held; without slices, any microbatch."""
        waits = (self.num_slices - 1) * self.forward[-1]
        return self.come_back[stage] - waits + self.release[stage] - self.arrive[stage]

    def mean_hold(self, stage: int) -> float:
        """Returns the least mean time that the slices of a microbatch are held."""
        later = (self.num_slices - 1) / 2
        return self.shortest_hold(stage) + later * (self.forward[-1] + self.grad[stage])

    def way_back(self, highest: int) -> float:
        """Returns the least time from a forward's end until its gradient, of the last slice."""
        both = self.forward[highest] + self.release[highest]
        return self.shortest_hold(highest) - both

    def way_down(self, lowest: int) -> float:
        """Returns the time from stage `lowest`'s gradient to the end of stage 0's backward."""
        if not lowest:
            return 0.0
        return self.come_back[0] - (self.come_back[lowest] + self.grad[lowest]) + self.release[0]


def _of_device(ways: _Ways, owned: list[int], num_pieces: int, room: int) -> list[float]:
    """Returns the bounds 3 to 6 for a device that runs the stages `owned`, lowest first."""
    lowest, highest = owned[0], owned[-1]
    pairs = len(owned) * num_pieces
    stage_of_pair = [s for s in owned for _ in range(num_pieces)]
    forwards = sum(ways.forward[s] for s in stage_of_pair)
    longest = sum(heapq.nlargest(room, (ways.forward[s] for s in stage_of_pair)))
    idle = max(ways.arrive[lowest], ways.come_back[highest] - longest)
    load = idle + forwards + sum(ways.release[s] for s in stage_of_pair)

    finished = heapq.nsmallest(
        pairs - room, (ways.release[s] - ways.grad[s] for s in stage_of_pair)
    )
    last_gradient = idle + forwards + sum(ways.grad[s] for s in stage_of_pair) + sum(finished)
    last_gradient += ways.way_down(lowest)

    held = sum(map(ways.mean_hold, stage_of_pair))
    ends = min(ways.forward[s] for s in owned) + min(ways.end[s] for s in owned)
    in_room = ways.arrive[lowest] + held / room + (room - 1) / 2 * ends

    slices = ways.num_slices
    others = [ways.release[s] for s in owned for _ in range(num_pieces - slices)]
    start = idle if pairs > room else ways.arrive[lowest]
    last_forward = start + forwards + sum(heapq.nsmallest(pairs - room, others))
    down = ways.come_back[0] - ways.come_back[highest] + (slices - 1) * ways.grad[0]
    own = slices * sum(ways.release[s] for s in owned)
    after = ways.way_back(highest) + max(down + ways.release[0], own)
    return [load, last_gradient, in_room, last_forward + after]


def _of_recomputing(
    ways: _Ways, owned: list[int], num_pieces: int, room: int, again: Sequence[int]
) -> list[float]:
    """Returns them for a device that recomputes `again[s]` of the pairs of each stage `s`."""
    lowest, highest = owned[0], owned[-1]
    forwards = num_pieces * sum(ways.forward[s] for s in owned)
    recomputes = sum(again[s] * ways.recompute[s] for s in owned)
    idle = max(ways.arrive[lowest], ways.come_back[highest] - forwards - recomputes)
    load = idle + forwards + recomputes + num_pieces * sum(ways.release[s] for s in owned)
    last_gradient = idle + forwards + recomputes + num_pieces * sum(ways.grad[s] for s in owned)
    last_gradient += ways.way_down(lowest)
    held = sum(
        (num_pieces - again[s]) * ways.shortest_hold(s)
        + again[s] * (ways.forward[s] + ways.recompute[s] + ways.release[s])
        for s in owned
    )
    return [load, last_gradient, ways.arrive[lowest] + held / room]
