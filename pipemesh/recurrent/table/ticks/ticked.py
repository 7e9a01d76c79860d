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
from typing import Any

import tensorflow as tf

from pipemesh.backend.functions import without_automatic_order
from pipemesh.backend.operations import MaybeTensor, pin_each
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.passes.traced_stage import Cutting
from pipemesh.recurrent.remat import FULL, Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import GRADS, OUTPUTS, Channel, Kind
from pipemesh.recurrent.table.lists import Key, Lists
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.parts import parts
from pipemesh.recurrent.table.state import State
from pipemesh.recurrent.table.ticks.body import Body, Source, put
from pipemesh.recurrent.table.ticks.codes import Roles
from pipemesh.recurrent.table.ticks.program import Places, program
from pipemesh.recurrent.table.ticks.variables import Name, Variables
from pipemesh.schedule import Action
from pipemesh.schedule.repeats import Loop

# A device that idles runs ahead until it needs something: about as many ticks as there are homes.
_PARALLEL_ITERATIONS = 32


class Ticked:
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
        self.state = state
        self.lists = Lists(machine, stages, cutting.num_microbatches)
        self.sources: dict[Channel, Source] = {
            Channel(OUTPUTS, -1): lambda m: parts(inputs, m, cutting)
        }
        self._machine = machine
        self._stages = stages
        self._cutting = cutting
        self._roles = Roles(order, machine.stage_devices, modes)
        self._places = Places(order, self._roles, cutting.num_microbatches)
        self.lists.sizes = self._places.sizes
        self._after_forward: dict[Key, Grads] | None = None

    def perform(self, items: Sequence[Action | Loop]) -> None:
        """Performs actions, as one loop; there are no loops among them."""
        actions = [item for item in items if isinstance(item, Action)]
        assert len(actions) == len(items)
        if not actions:
            return
        self.state.forget_tokens_of_other_graphs()
        for stage in sorted({action.stage for action in actions if action.kind not in "FR"}):
            self._machine.begin(stage, self.state)
        homes = self._machine.stage_devices
        programs, num_ticks = program(actions, homes, self._roles, self._places)
        variables = Variables(programs, self._machine, self._stages, homes, self.state, self.lists)
        body = Body(self._machine, programs, variables, self.lists, self.sources, self.state)

        def tick(k: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            return [k + 1, *variables.flatten(body.tick(variables.pack(flat)))]

        count = tf.constant(num_ticks)
        start = {name: variable.start for name, variable in variables.named.items()}
        handles = dict(self.lists.handles)
        with self._machine.guarding(), without_automatic_order():
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
            elif name.what == "list":
                self.lists.handles[name.key] = values[name]
            elif name.what not in ("tick", "register"):
                put(self.state, name, values[name])

    def seed(self, output_grads: Grads) -> None:
        """Cuts the gradients of the outputs of the whole batch."""
        self._begin_backward(lambda m: parts(output_grads, m, self._cutting))

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        self._begin_backward(lambda m: grads * self._cutting.replicas)

    def _begin_backward(self, source: Source) -> None:
        self.sources[Channel(GRADS, len(self._stages))] = source
        # A second backward pass takes the same values once more.
        if self._after_forward is None:
            self._after_forward = dict(self.lists.handles)
        self.lists.handles = dict(self._after_forward)

    def outputs(self) -> Tensors:
        """Those of the last stage for the whole batch."""
        return self._joined(OUTPUTS, len(self._stages) - 1)

    def input_grads(self) -> Grads:
        """The gradients of the pipeline's inputs."""
        return self._joined(GRADS, 0)

    def _joined(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        joined: list[Any] = self.lists.joined(Lists.key(kind, stage, FULL), self._cutting.batch_dim)
        return joined
