"""In which form a table becomes operations: action by action, with loops, or as one loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.remat import Mode
from pipemesh.schedule import Action
from pipemesh.schedule.repeats import Loop, find_loops

Form = Literal["unrolled", "rolled", "ticks"]

# Tables that would put more nodes into the graph become loops by themselves, if that makes them at
# most half as large. Before the first step, TensorFlow needs 0.2 to 0.3 ms of CPU time for each.
ROLL_ABOVE = 4_000
# Where loops leave more nodes than this, and more actions for each home, all actions become one
# loop: its body has about as many operations as some ten actions of each home, and a step takes
# a fraction of a millisecond longer for each action, on the processor.
TICK_ABOVE_NODES = 30_000
TICK_ABOVE_ACTIONS = 32
# What an action has besides the nodes of its stage.
_OWN_NODES = 10
# In longer tables loops are not looked for by themselves: that takes seconds, and what they would
# leave is too much in all but a few.
SEARCH_BELOW = 20_000


def form_of(
    order: Sequence[Action],
    rolled: bool | Literal["ticks"] | None,
    modes: Mapping[tuple[int, int], Mode],
    traced: Sequence[TracedStage],
    num_homes: int,
) -> tuple[Form, Sequence[Action | Loop]]:
    """The form of a run, and everything that it performs.

    Args:
        order: all actions, in order.
        rolled: as in `Options`.
        modes: of remat, for each stage and microbatch.
        traced: the stages.
        num_homes: how many homes there are.

    Raises:
        PipelineError: one loop over ticks is wanted and cannot be had; says why.
    """
    together = [t.stage.name for t in traced if t.cut.has_collectives]
    if rolled == "ticks":
        if together:
            raise PipelineError(
                f"rolled is 'ticks', but stage {together[0]!r} has collectives, which "
                "one loop over ticks does not run yet; give rolled=None, True or False"
            )
        return "ticks", order
    microbatches = len({action.microbatch for action in order})
    num_nodes = microbatches * sum(t.num_nodes() for t in traced)
    if rolled is False or (rolled is None and num_nodes <= ROLL_ABOVE):
        return "unrolled", order
    if rolled is None and len(order) > SEARCH_BELOW and not together:
        return "ticks", order
    items = find_loops(order, lambda action: modes[action.stage, action.microbatch])
    if rolled:
        return "rolled", items
    form: Form = "rolled" if 2 * num_actions(items) <= len(order) else "unrolled"
    left = items if form == "rolled" else order
    count = num_actions(left)
    nodes_left = count * (num_nodes / len(order) + _OWN_NODES)
    is_long = nodes_left > TICK_ABOVE_NODES and count > TICK_ABOVE_ACTIONS * num_homes
    if is_long and not together:
        return "ticks", order
    return form, left


def num_actions(items: Sequence[Action | Loop]) -> int:
    """How many actions the graph has."""
    return sum(len(item.body) if isinstance(item, Loop) else 1 for item in items)
