"""The shortest of all schedules of tiny problems, found by trying every one."""

from itertools import product

from pipemesh.schedule import Action, Schedule, simulate
from pipemesh.schedule.timeline import peak_of_row


def shortest_in_ticks(stage_devices, num_microbatches, limits):
    """The least number of ticks, if every F, I and W takes one and transfers are free.

    Walks over all states that can be reached. A state says how much has been done of every pair:
    nothing, F, I or W. A full backward is an I and a W in turn.
    """
    last = len(stage_devices) - 1
    pairs = list(product(range(last + 1), range(num_microbatches)))
    at = {pair: index for index, pair in enumerate(pairs)}
    devices = range(max(stage_devices) + 1)
    own = [[p for p in pairs if stage_devices[p[0]] == d] for d in devices]

    def moves(state, device):
        """Pairs of which a device may do the next action."""
        done = {pair: state[at[pair]] for pair in own[device]}
        room = limits[device] - sum(0 < level < 3 for level in done.values())
        found = []
        for (stage, m), level in done.items():
            before = stage == 0 or state[at[stage - 1, m]] > 0
            after = stage == last or state[at[stage + 1, m]] > 1
            if (level == 0 and before and room) or (level == 1 and after) or level == 2:
                found.append((stage, m))
        return [*found, None]

    states, ticks, end = {(0,) * len(pairs)}, 0, (3,) * len(pairs)
    while end not in states:
        following = set()
        for state in states:
            for choice in product(*(moves(state, device) for device in devices)):
                now = list(state)
                for pair in filter(None, choice):
                    now[at[pair]] += 1
                following.add(tuple(now))
        # Whoever idled for nothing is not worth following.
        states = following - states
        ticks += 1
    return ticks


def orders(device, stage, num_microbatches):
    """Every row of a device that has one stage: backwards whole or split, microbatches in turn."""

    def extend(row, level):
        if all(done == 3 for done in level):
            yield tuple(row)
        for m, done in enumerate(level):
            for kind, needed, after in (("F", 0, 1), ("B", 1, 3), ("I", 1, 2), ("W", 2, 3)):
                if done == needed:
                    changed = (*level[:m], after, *level[m + 1 :])
                    yield from extend([*row, Action(stage, kind, m)], changed)

    yield from extend([], (0,) * num_microbatches)


def shortest(costs, num_microbatches, limits):
    """The least makespan on one stage a device, for any costs."""
    rows = [
        [row for row in orders(d, d, num_microbatches) if peak_of_row(row) <= limit]
        for d, limit in enumerate(limits)
    ]
    best = float("inf")
    for chosen in product(*rows):
        try:
            schedule = Schedule(chosen, tuple(range(len(limits))), num_microbatches)
            best = min(best, simulate(schedule, costs).makespan)
        except ValueError:
            continue  # A deadlock.
    return best
