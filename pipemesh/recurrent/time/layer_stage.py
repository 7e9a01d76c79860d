"""A recurrent layer as a stage of a pipeline whose microbatches are chunks of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.time.cell import (
    Arguments,
    ArgumentSpecs,
    Cell,
    Structures,
    TracedCell,
    groups,
)
from pipemesh.recurrent.time.cell_out import CellOut
from pipemesh.recurrent.time.loop_gradient import run_loop
from pipemesh.recurrent.time.time_loop import Captures, Span, TimeLoop, extras_shapes


class LayerArguments(NamedTuple):
    """The user's arguments for one layer.

    Attributes:
        number: of the layer.
        device: its device.
        cell_fn: its cell.
        cell_grad: the gradient of one time step, or None.
        cell_out: maps its state to the inputs of the layer above; None for the last layer.
        cell_out_grad: the gradient of `cell_out`, or None.
        theta: nested weights.
        state0: the nested initial state.
        accumulator_layer: has GetAccumulatorValues and SetAccumulatorValues; or None.
    """

    number: int
    device: str
    cell_fn: Callable[[Any, Any, Any], tuple[Any, Any]]
    cell_grad: Callable[..., Sequence[Any]] | None
    cell_out: Callable[[Any], Any] | None
    cell_out_grad: Callable[[Any], Any] | None
    theta: Any
    state0: Any
    accumulator_layer: Any


class LayerStage:
    """One layer, traced for one time step.

    Args:
        arguments: the layer.
        inputs: structure of its inputs.
        input_specs: shapes and dtypes of its inputs at one time step.
        unused_state: True if the user states that its cell reads no state.

    Attributes:
        structures: of the arguments of its cell.
        outputs: structure of its outputs to the layer above; None for the last layer.
        output_specs: shapes and dtypes of these outputs at one time step.

    Raises:
        PipelineError: the cell or one of its functions is invalid.
    """

    def __init__(
        self,
        arguments: LayerArguments,
        inputs: Structure,
        input_specs: Sequence[tf.TensorSpec],
        unused_state: bool,
    ) -> None:
        number, layer = arguments.number, arguments.accumulator_layer
        self._arguments = arguments
        accumulators = layer.GetAccumulatorValues() if layer is not None else ()
        parts = (arguments.theta, arguments.state0, accumulators)
        names = (f"thetas[{number}]", f"init_states[{number}]", f"the accumulators of {number}")
        of_parts = [Structure(part, name) for part, name in zip(parts, names, strict=True)]
        self.structures = Structures(of_parts[0], of_parts[1], of_parts[2], inputs)
        with tf.device(arguments.device):
            self._theta, self._state0, found = (
                structure.tensors(part) for structure, part in zip(of_parts, parts, strict=True)
            )
        self._accumulators0 = [tf.stop_gradient(x) for x in found]
        if unused_state:
            self._state0 = [tf.stop_gradient(x) for x in self._state0]
        self._check_state()
        of_theta, of_state, of_accumulators = map(specs_of, self._given())
        specs = ArgumentSpecs(of_theta, of_state, of_accumulators, list(input_specs))
        function = arguments.cell_fn
        cell = Cell(
            f"{getattr(function, '__name__', type(function).__name__)} of layer {number}",
            function,
            arguments.cell_grad,
            layer,
            None,
            lambda _: arguments.cell_grad is None,
            arguments.device,
        )
        traced = TracedCell(cell, self.structures, specs)
        read = traced.state_read()
        if unused_state and read:
            raise PipelineError(
                f"unused_acc_state is True, which says that no cell reads the state it is given, "
                f"but what the cell {cell.name!r} returns depends on {', '.join(read)}; leave "
                "unused_acc_state out"
            )
        out = None
        if arguments.cell_out is not None:
            name = f"cell_outs[{number}]"
            state = self.structures.state
            out = CellOut(
                name, arguments.cell_out, arguments.cell_out_grad, state, specs.state, cell.device
            )
        self.outputs = out.structure if out else None
        self.output_specs = out.specs if out else []
        # A user-defined gradient may read more than the cell does.
        reads_state = bool(read) or (cell.gradient is not None and not unused_state)
        self._loop = TimeLoop(traced, None, False, extras_shapes(traced, None), out, reads_state)
        keep_alive(self)

    def _given(self) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        return self._theta, self._state0, self._accumulators0

    def _check_state(self) -> None:
        if not self._state0:
            raise PipelineError(
                f"init_states[{self._arguments.number}] has no tensor in it, so that there is "
                "nothing to compute"
            )
        for part, structure in zip(self._given(), self.structures, strict=False):
            for tensor, leaf in zip(part, structure.leaf_names, strict=True):
                check_static(leaf, tensor)

    def stage(self, bounds: Sequence[tf.Tensor], chunk: int) -> Stage:
        """Returns the stage whose microbatches are chunks of time.

        `bounds` are int32 scalars: the first time step to compute and the one after the last.
        `chunk` is the number of time steps in a chunk.
        """
        captures = self._loop.captures
        weights = [self._theta, captures.cell, captures.out, list(bounds)]

        def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
            del step
            theta, cell_captures, out_captures, (begin, end) = groups(theta, weights)
            state, accumulators = groups(carry, self._given()[1:])
            first = tf.cast(microbatch, tf.int32) * chunk
            span = Span(
                first,
                tf.clip_by_value(begin - first, 0, chunk),
                tf.clip_by_value(end - first, 0, chunk),
            )
            results = run_loop(
                self._loop,
                Arguments(theta, state, accumulators, list(inputs)),
                Captures(cell_captures, out_captures, []),
                span,
            )
            # The only outputs of the last layer are its states.
            outputs = results.acc_out if self._loop.out else results.acc_state
            return outputs, [*results.state, *results.accumulators]

        return Stage(
            self._loop.cell.cell.name,
            forward,
            [x for part in weights for x in part],
            [*self._state0, *self._accumulators0],
            self._arguments.device,
            recurrent=True,
        )

    def finish(self, carry: Sequence[tf.Tensor]) -> Any:
        """Gives the accumulators to their layer and returns the nested final state."""
        state, accumulators = groups(carry, self._given()[1:])
        if self._arguments.accumulator_layer is not None:
            values = [tf.stop_gradient(x) for x in accumulators]
            packed = self.structures.accumulators.pack(values)
            self._arguments.accumulator_layer.SetAccumulatorValues(packed)
        return self.structures.state.pack(state)


def check_static(name: str, tensor: tf.Tensor) -> None:
    """Raises a PipelineError if a tensor has no static shape."""
    if not tensor.shape.is_fully_defined():
        raise PipelineError(
            f"{name} has shape {tensor.shape}; StackedRecurrent needs static shapes, time "
            "included: pad to a fixed length (padding steps are skipped) and set the shape with "
            "tf.ensure_shape, or apply Recurrent layer by layer, which takes any length"
        )
