"""Stages of any operations, each traced once, as the computation of cores at a tick."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend.structure import is_differentiable
from pipemesh.lowering.lowering import Slices
from pipemesh.recurrent.circular.tick_loop import Leaves, Sums, Tick
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.stage import Tensors
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.watch.finite_values import empty_note


class TracedStages:
    """The computation of one tick of `alike_pipeline`: on each core, the stage that is due.

    A core chooses among the functions of its stages, so each stage keeps its own weights and random
    numbers. At ticks without work it passes its input on: it computes nothing, and no check fails.

    Args:
        machine: the stages, traced.
        devices: of each core; stage s is on core s modulo the number of devices.

    Attributes:
        floating: indices of the tensors between stages that may have a gradient.
    """

    def __init__(self, machine: Machine, devices: Sequence[str]) -> None:
        self._devices = devices
        self._stages = machine.stages
        self._traced = machine.traced
        self._passes = [machine.passes(number, FULL) for number in range(len(machine.stages))]
        for passes in self._passes:
            passes.make()
        self._steps: Tensors = []
        for device in devices:
            with tf.device(device):
                # Tensors that a loop uses are moved to its device before.
                self._steps.append(tf.identity(machine.step))
        specs = self._traced[0].output_specs
        self.floating = [i for i, spec in enumerate(specs) if is_differentiable(spec)]

    def forward(self, now: Tick, x: Leaves, weights: Sequence[Slices]) -> Leaves:
        """Returns the outputs of the stages."""
        del weights

        def on_core(core: int, scalars: Tensors) -> Tensors:
            given = [leaf[core] for leaf in x]

            def stage(number: int) -> Tensors:
                theta = list(self._stages[number].theta)
                return self._passes[number].forward(theta, [], given, scalars, [empty_note()])[0]

            return self._choose(core, now, stage, given)

        return tuple(zip(*self._each_core(now, on_core), strict=True))

    def zero_sums(self, weights: Sequence[Slices]) -> Sums:
        """Returns for each stage zero sums of the gradients of its weights."""
        del weights
        return tuple(tuple(passes.zero_gradients()) for passes in self._passes)

    def backward(
        self, now: Tick, x: Leaves, weights: Sequence[Slices], grad_y: Leaves, sums: Sums
    ) -> tuple[Leaves, Sums]:
        """Recomputes the stages; returns gradients of their inputs, and the sums."""
        del weights
        new = [list(of_stage) for of_stage in sums]

        def on_core(core: int, scalars: Tensors) -> Tensors:
            given, grads = [leaf[core] for leaf in x], [leaf[core] for leaf in grad_y]
            mine = range(core, len(self._stages), len(self._devices))

            def stage(number: int) -> Tensors:
                found, added = self._backward_of(number, given, grads, scalars, sums[number])
                return [
                    *found,
                    *(t for other in mine for t in (added if other == number else sums[other])),
                ]

            idle = [*map(tf.zeros_like, grads), *(t for number in mine for t in sums[number])]
            results = iter(self._choose(core, now, stage, idle))
            grad_x = [next(results) for _ in grads]
            for number in mine:
                new[number] = [next(results) for _ in sums[number]]
            return grad_x

        return tuple(zip(*self._each_core(now, on_core), strict=True)), tuple(map(tuple, new))

    def _backward_of(
        self,
        number: int,
        given: Tensors,
        grads: Tensors,
        scalars: Tensors,
        sums: Sequence[tf.Tensor],
    ) -> tuple[Tensors, Tensors]:
        traced, passes = self._traced[number], self._passes[number]
        by_name = dict(zip(traced.inputs, given, strict=True))
        by_place = dict(zip(self.floating, grads, strict=True))
        result = passes.backward(
            list(self._stages[number].theta),
            [by_name[name] for name in passes.cuts.kept],
            [by_place[i] for i in traced.gradients.of_outputs],
            scalars,
            list(sums),
            [empty_note()],
        )
        found = [
            tf.zeros_like(given[i]) if grad is None else grad
            for i in self.floating
            for grad in [result.input_grads[i]]
        ]
        return found, result.accumulators or []

    def _each_core(self, now: Tick, on_core: Callable[[int, Tensors], Tensors]) -> list[Tensors]:
        results: list[Tensors] = []
        for core, device in enumerate(self._devices):
            with tf.device(device):
                microbatch = tf.cast(now.microbatches[core], tf.int64)
                results.append(on_core(core, [microbatch, self._steps[core]]))
        return results

    def _choose(
        self, core: int, now: Tick, stage: Callable[[int], Tensors], idle: Tensors
    ) -> Tensors:
        """Returns the result of the stage that is due, or of `idle` at a tick without work."""
        device = self._devices[core]

        def branch(number: int) -> Callable[[], Tensors]:
            def compute() -> Tensors:
                with tf.device(device):
                    return list(stage(number))

            return compute

        def hand_on() -> Tensors:
            with tf.device(device):
                return [tf.identity(t) for t in idle]

        mine = range(core, len(self._stages), len(self._devices))
        which = tf.where(now.busy[core], now.rounds[core] + 1, 0)
        results = tf.switch_case(which, [hand_on, *map(branch, mine)])
        return list(results)
