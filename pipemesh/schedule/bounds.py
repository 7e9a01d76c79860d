"""How short a step can be at best: a bound that no schedule of the same work can beat.

What is fixed: costs, which device runs which stage, the number of microbatches, and how many
(stage, microbatch) pairs a device may hold. What is free: the order of actions on each device,
and whether a backward is whole or split. `lower_bound` is the largest of the five bounds proved
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

Without backward actions only the path and the load with what comes before and after it are left.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from pipemesh.schedule.costs import Costs, StageCosts


def lower_bound(
    costs: Costs,
    stage_devices: Sequence[int],
    num_microbatches: int,
    memory_limits: Sequence[int] | None = None,
    *,
    forward_only: bool = False,
) -> float:
    """A time that no schedule of this work is shorter than.

    Args:
        costs: durations and transfer times, one number or one a stage.
        stage_devices: for each stage its device.
        num_microbatches: at least 1.
        memory_limits: for each device the most (stage, microbatch) pairs that it may hold, in the
            sense of `Timeline.peak_activations`; None for no limit.
        forward_only: whether there is no backward pass.

    Returns:
        The bound, in the unit of the costs; the module says how it is proved.

    Example:
        >>> lower_bound(Costs(), (0, 1, 2, 3), 8)
        27.0
        >>> lower_bound(Costs(), (0, 1, 2, 3), 8, memory_limits=[2, 2, 2, 2])
        37.0
    """
    ways = _Ways.of(costs.per_stage(len(stage_devices)), stage_devices)
    devices = range(max(stage_devices) + 1)
    stages = [[s for s, home in enumerate(stage_devices) if home == device] for device in devices]
    if forward_only:
        return max(
            ways.arrive[own[0]]
            + num_microbatches * sum(ways.forward[s] for s in own)
            + (ways.arrive[-1] + ways.forward[-1] - ways.arrive[own[-1]] - ways.forward[own[-1]])
            for own in stages
            if own
        )
    bounds = [ways.come_back[0] + ways.release[0]]
    for device, own in enumerate(stages):
        if own:
            pairs = len(own) * num_microbatches
            room = pairs if memory_limits is None else min(pairs, memory_limits[device])
            bounds += _of_device(ways, own, num_microbatches, max(1, room))
    return max(bounds)


@dataclasses.dataclass(frozen=True)
class _Ways:
    """What the proofs speak of, for every stage.

    Attributes:
        forward: `f`.
        grad: `g`, the least time in which a gradient passes.
        release: `r`, the least time that a backward takes in all.
        end: the least duration of the action that ends a backward.
        arrive: when the first microbatch can arrive on its way up.
        come_back: when the first gradient can arrive on its way back.
    """

    forward: tuple[float, ...]
    grad: tuple[float, ...]
    release: tuple[float, ...]
    end: tuple[float, ...]
    arrive: tuple[float, ...]
    come_back: tuple[float, ...]

    @classmethod
    def of(cls, costs: StageCosts, stage_devices: Sequence[int]) -> _Ways:
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
        come_back = [arrive[last] + costs.forward[last]]
        for s in reversed(range(last)):
            come_back.append(come_back[-1] + grad[s + 1] + lag[s])
        return cls(
            costs.forward,
            grad,
            tuple(min(b, i + w) for _, b, i, w in parts),
            tuple(min(b, w) for _, b, _, w in parts),
            tuple(arrive),
            tuple(reversed(come_back)),
        )


def _of_device(ways: _Ways, own: list[int], num_microbatches: int, room: int) -> list[float]:
    """The bounds 3, 4 and 5 for a device that runs the stages `own`, ascending."""
    lowest, highest = own[0], own[-1]
    pairs = len(own) * num_microbatches
    each = [s for s in own for _ in range(num_microbatches)]
    forwards = sum(ways.forward[s] for s in each)
    longest = sum(heapq.nlargest(room, (ways.forward[s] for s in each)))
    idle = max(ways.arrive[lowest], ways.come_back[highest] - longest)
    load = idle + forwards + sum(ways.release[s] for s in each)

    finished = heapq.nsmallest(pairs - room, (ways.release[s] - ways.grad[s] for s in each))
    way_down = 0.0
    if lowest:
        # From the end of the gradient of stage `lowest` to the end of the backward of stage 0.
        way_down = ways.come_back[0] - (ways.come_back[lowest] + ways.grad[lowest])
        way_down += ways.release[0]
    last_gradient = idle + forwards + sum(ways.grad[s] for s in each) + sum(finished) + way_down

    held = sum(ways.come_back[s] + ways.release[s] - ways.arrive[s] for s in each)
    ends = min(ways.forward[s] for s in own) + min(ways.end[s] for s in own)
    in_room = ways.arrive[lowest] + held / room + (room - 1) / 2 * ends
    return [load, last_gradient, in_room]
