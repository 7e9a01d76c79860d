"""Schedules for property tests, published ones and random ones, and what their actions need."""

import itertools
import random

from hypothesis import strategies as st

from pipemesh.schedule import Action, Costs, Schedule, build, validate
from pipemesh.schedule.builders import BUILDERS
from pipemesh.schedule.schedule import loop, vee


def needed(stage, kind, m, q):
    """The (stage, kind, microbatch, slice) whose results an action takes, where they exist."""
    if kind == "F":
        return {(stage - 1, "F", m, q), (stage, "F", m, q - 1)}
    if kind in "RW":
        return {(stage, {"R": "F", "W": "I"}[kind], m, q)}
    kept = {(stage, made, m, q) for made in "FR"}
    return kept | {
        key for made in "BI" for key in ((stage + 1, made, m, q), (stage, made, m, q + 1))
    }


def inputs_of(schedule):
    """For each action the actions whose results it takes."""
    actions = {(a.stage, a.kind, a.microbatch, a.slice or 0): a for r in schedule.rows for a in r}
    return {a: {actions[k] for k in needed(*key) & set(actions)} for key, a in actions.items()}


def at_random(rng, stage_devices, num_microbatches, num_slices, split, again):
    """A schedule whose actions are taken at random among those that are ready."""
    pieces = range(len(stage_devices)), range(num_microbatches), range(num_slices)
    todo = {
        piece: ["F", *("R" * (rng.random() < again)), *("B" if rng.random() < split else "IW")]
        for piece in itertools.product(*pieces)
    }
    left = {(s, kind, m, q) for (s, m, q), kinds in todo.items() for kind in kinds}
    rows = [[] for _ in set(stage_devices)]
    while left:
        ready = [
            (s, m, q)
            for (s, m, q), kinds in todo.items()
            if kinds and not needed(s, kinds[0], m, q) & left
        ]
        s, m, q = rng.choice(ready)
        kind = todo[s, m, q].pop(0)
        left.remove((s, kind, m, q))
        rows[stage_devices[s]].append(Action(s, kind, m, q if num_slices > 1 else None))
    return validate(Schedule(rows, stage_devices, num_microbatches, num_slices))


@st.composite
def random_schedules(draw):
    num_devices = draw(st.integers(1, 4))
    places = st.sampled_from([loop(num_devices), loop(num_devices, 2), vee(num_devices)])
    share = st.sampled_from([0, 0.5, 1])
    return at_random(
        random.Random(draw(st.integers(0, 10**6))),
        draw(places | st.permutations(loop(num_devices, 2)).map(tuple)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(share),
        draw(share),
    )


published = st.builds(
    lambda name, num_devices, factor: build(name, num_devices, 2 * factor * num_devices),
    st.sampled_from([*sorted(BUILDERS), "seq1f1b:2", "seq1f1b:4"]),
    st.integers(1, 4),
    st.integers(1, 2),
)
schedules = published | random_schedules()


@st.composite
def costs_for(draw, schedule):
    """Costs of a schedule's actions, one number or one a stage."""
    cost = st.integers(0, 8)
    per_stage = st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages)
    return Costs(*(draw(per_stage | cost) for _ in range(6)))
