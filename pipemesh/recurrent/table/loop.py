"""Performs a schedule as one loop over its ticks.

The body of the loop has each kind of action of each home once. Tables of numbers, with a row per
tick, say which action is due, for which microbatch, and where its values are. So the graph grows
only with the number of stages. TensorFlow overlaps the iterations of a loop, each device as far as
its inputs allow, so a tick is no barrier.

An action that is not due is dead, in TensorFlow's sense: one side of a `Switch` has no value, and
nothing that depends on it is computed. A value for another home is sent when its action has made
it. It stays in a buffer of the receiving home until it is read; other actions do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.graphs import without_automatic_order
from pipemesh.backend.operations import pin_each
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.batch import parts
from pipemesh.recurrent.table.buffers import Buffers, Key, key_of
from pipemesh.recurrent.table.loop_body import Body, Source, put
from pipemesh.recurrent.table.loop_program import HomeBuffer, Roles, Slots, program
from pipemesh.recurrent.table.loop_variables import Name, Variables
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.values import GRADS, OUTPUTS, Channel, State
from pipemesh.schedule import Action

# An idle device runs ahead until it needs a value: about as many ticks as there are homes.
_PARALLEL_ITERATIONS = 32


class Loop:
    """A performer that runs actions as one loop."""

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
        self._machine = machine
        self._stages = stages
        self._cutting = cutting
        # Functions of the microbatch for channels that no action writes.
        self._sources: dict[Channel, Source] = {
            Channel(OUTPUTS, -1): lambda m: parts(inputs, m, cutting)
        }
        self._roles = Roles(order, machine.stage_devices, modes)
        self._slots = Slots(order, self._roles, cutting.num_pieces, self._buffers_of)
        self._buffers = Buffers(machine, stages, self._slots.sizes)
        self._after_forward: dict[Key, Grads] | None = None

    def _buffers_of(self, key: Key) -> list[HomeBuffer | None]:
        home, machine = self._machine.stage_devices[key.stage], self._machine
        return [
            None if spec is None else HomeBuffer(home, place, spec.dtype)
            for spec, place in zip(machine.specs(*key), machine.places(*key), strict=True)
        ]

    def seed(self, output_grads: Grads) -> None:
        """Splits the gradients of the outputs of the whole batch."""
        self._begin_backward(lambda m: parts(output_grads, m, self._cutting))

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        self._begin_backward(lambda m: grads * self._cutting.replicas)

    def _begin_backward(self, source: Source) -> None:
        self._sources[Channel(GRADS, len(self._stages))] = source
        # A second backward pass takes the same values again.
        if self._after_forward is None:
            self._after_forward = dict(self._buffers.handles)
        self._buffers.handles = dict(self._after_forward)

    def perform(self, actions: Sequence[Action]) -> None:
        """Performs actions as one loop."""
        if not actions:
            return
        self.state.forget_tokens_of_other_graphs()
        for stage in sorted({action.stage for action in actions if action.kind not in "FR"}):
            self._machine.begin(stage, self.state)
        homes, buffers = self._machine.stage_devices, self._buffers
        programs, num_ticks = program(actions, homes, self._roles, self._slots)
        variables = Variables(programs, self._machine, self._stages, homes, self.state, buffers)
        body = Body(self._machine, programs, variables, buffers, self._sources, self.state)

        def tick(k: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            return [k + 1, *variables.flatten(body.tick(variables.pack(flat)))]

        count = tf.constant(num_ticks)
        start = {name: variable.start for name, variable in variables.named.items()}
        handles = dict(buffers.handles)
        with self._machine.guarding(), without_automatic_order():
            results = tf.while_loop(
                lambda k, *_: k < count,
                tick,
                [tf.constant(0), *variables.flatten(start)],
                shape_invariants=[tf.TensorShape([]), *variables.shapes()],
                parallel_iterations=max(_PARALLEL_ITERATIONS, 2 * len(programs)),
            )
        buffers.handles = handles
        self._finish(variables, variables.pack(results[1:]))

    def _finish(self, variables: Variables, values: Mapping[Name, Grads]) -> None:
        """Passes the loop's results to later operations."""
        for name, variable in variables.named.items():
            if name.what == "token":
                # Separate operations: a dependency on the loop would wait for all of it.
                pinned = pin_each(values[name], variable.devices)
                self.state.tokens[name.key] = [[t.op] for t in pinned if t is not None]
            elif name.what in ("indexed", "home"):
                self._buffers.handles[name.key] = values[name]
            elif name.what not in ("tick", "arrival"):
                put(self.state, name, values[name])

    def outputs(self) -> Tensors:
        """Returns the last stage's outputs for the whole batch."""
        key = key_of(Channel(OUTPUTS, len(self._stages) - 1))
        return [t for t in self._buffers.joined(key, self._cutting) if t is not None]

    def input_grads(self) -> Grads:
        """Returns the gradients of the pipeline's inputs."""
        return self._buffers.joined(key_of(Channel(GRADS, 0)), self._cutting)
