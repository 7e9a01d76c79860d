"""A run that is one loop over the ticks of its table.

The body of the loop has each kind of action of each home once. Which of them a home performs at
a tick, for which microbatch, and where it finds what it needs, stands in tables of numbers with a
row a tick. So the graph grows with the number of stages alone. TensorFlow runs the repetitions of a
loop overlapped, each device as far as its inputs allow, so a tick is no barrier.

An action that is not due is dead, in TensorFlow's words: one side of a `Switch` is not there, and
nothing that depends on it is computed. What one home sends to another is there when the action
is that makes it, and lies in a register, or in a list, until it is used: whoever does not use it
does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.graphs import without_automatic_order
from pipemesh.backend.operations import pin_each
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.listed import Listed
from pipemesh.recurrent.table.lists import Key
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.state import State
from pipemesh.recurrent.table.ticks.body import Body, put
from pipemesh.recurrent.table.ticks.codes import Roles
from pipemesh.recurrent.table.ticks.program import Places, Shelf, program
from pipemesh.recurrent.table.ticks.variables import Name, Variables
from pipemesh.schedule import Action
from pipemesh.schedule.repeats import Loop

# A device that idles runs ahead until it needs something: about as many ticks as there are homes.
_PARALLEL_ITERATIONS = 32


class Ticked(Listed):
    """Performs actions as one loop.

    Args:
        machine: performs actions.
        state: what stages hold.
        stages: the stages.
        inputs: of the pipeline, the whole batch.
        cutting: how the batch is cut.
        modes: of remat, for each stage and microbatch.
        order: everything that will be performed, in order.

    Attributes:
        state: what stages hold.
        lists: values that lie in lists.
        sources: for channels that no action makes a function of the microbatch.
    """

    def __init__(
        self,
        machine: Machine,
        state: State,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
        modes: Mapping[tuple[int, int], Mode],
        order: Sequence[Action],
    ) -> None:
        super().__init__(machine, state, stages, inputs, cutting)
        self._roles = Roles(order, machine.stage_devices, modes)
        self._places = Places(order, self._roles, cutting.num_pieces, self._shelves)
        self.lists.sizes = self._places.sizes

    def _shelves(self, key: Key) -> list[Shelf | None]:
        home, machine = self.machine.stage_devices[key.stage], self.machine
        return [
            None if spec is None else Shelf(home, place, spec.dtype)
            for spec, place in zip(machine.specs(*key), machine.places(*key), strict=True)
        ]

    def perform(self, items: Sequence[Action | Loop]) -> None:
        """Performs actions, as one loop; there are no loops among them."""
        actions = [item for item in items if isinstance(item, Action)]
        assert len(actions) == len(items)
        if not actions:
            return
        self.state.forget_tokens_of_other_graphs()
        for stage in sorted({action.stage for action in actions if action.kind not in "FR"}):
            self.machine.begin(stage, self.state)
        homes = self.machine.stage_devices
        programs, num_ticks = program(actions, homes, self._roles, self._places)
        variables = Variables(programs, self.machine, self.stages, homes, self.state, self.lists)
        body = Body(self.machine, programs, variables, self.lists, self.sources, self.state)

        def tick(k: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            return [k + 1, *variables.flatten(body.tick(variables.pack(flat)))]

        count = tf.constant(num_ticks)
        start = {name: variable.start for name, variable in variables.named.items()}
        handles = dict(self.lists.handles)
        with self.machine.guarding(), without_automatic_order():
            results = tf.while_loop(
                lambda k, *_: k < count,
                tick,
                [tf.constant(0), *variables.flatten(start)],
                shape_invariants=[tf.TensorShape([]), *variables.shapes()],
                parallel_iterations=max(_PARALLEL_ITERATIONS, 2 * len(programs)),
            )
        self.lists.handles = handles
        self._finish(variables, variables.pack(results[1:]))

    def _finish(self, variables: Variables, values: Mapping[Name, Grads]) -> None:
        """Hands what the loop has left to what comes after it."""
        for name, variable in variables.named.items():
            if name.what == "token":
                # Operations of their own: a dependency on the loop would wait for all of it.
                pinned = pin_each(values[name], variable.devices)
                self.state.tokens[name.key] = [[t.op] for t in pinned if t is not None]
            elif name.what in ("list", "shelf"):
                self.lists.handles[name.key] = values[name]
            elif name.what not in ("tick", "register"):
                put(self.state, name, values[name])
