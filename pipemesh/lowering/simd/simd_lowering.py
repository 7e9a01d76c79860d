"""SIMD lowering: the program of one core, which every core runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient, install_branch_gradients
from pipemesh.lowering.differentiate import call_local
from pipemesh.lowering.lowering import Lowering, Slices, whole_tensor
from pipemesh.mesh import LayoutRules, Mesh, TensorLayout

install_branch_gradients()


class SimdLowering(Lowering):
    """A lowering to the program of one core; the graph does not grow with the number of cores.

    `collectives.py` has its kinds, which communicate by TensorFlow's collectives or a TPU's. All
    cores call the methods that communicate in the same order.

    Attributes:
        core: int32 scalar, the number of the core that runs the program. It is an input of the
            program, which computes its coordinates from it.

    Raises:
        LayoutError: a rule names an unknown axis.
    """

    num_slices = 1

    def __init__(self, mesh: Mesh, rules: LayoutRules, core: tf.Tensor) -> None:
        super().__init__(mesh, rules)
        self.core = core

    def map_to_several(
        self, function: Callable[..., Sequence[tf.Tensor]], *operands: Slices
    ) -> list[Slices]:
        """Applies a local function."""
        with self.computing_slices():
            return [(x,) for x in call_local(function, [operand[0] for operand in operands])]

    def raw_map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function without checking for other values that it uses."""
        return (function(*(operand[0] for operand in operands)),)

    def coordinate(self, axis: str) -> Slices:
        """Computes the coordinate from the number of the core."""
        return (tf.math.floormod(self.core // self.mesh.stride(axis), self.mesh.size(axis)),)

    def with_gradient(
        self,
        forward: Callable[..., Slices],
        backward: Callable[[Slices], Sequence[Slices]],
        *operands: Slices,
    ) -> Slices:
        """Computes `forward(*operands)` with the gradients that `backward` computes."""
        if not operands[0][0].dtype.is_floating:
            return forward(*operands)

        @custom_gradient
        def call(*tensors: tf.Tensor) -> Any:
            def grads(grad: tf.Tensor) -> list[tf.Tensor]:
                # Gradients of lookups are sparse; communication is dense.
                return [part for (part,) in backward((tf.convert_to_tensor(grad),))]

            return forward(*((x,) for x in tensors))[0], grads

        return (call(*(x for (x,) in operands)),)

    def import_tensor(self, tensor: tf.Tensor, layout: TensorLayout) -> Slices:
        """Cuts this core's slice out of a tensor that every core has."""
        slices: Slices = (whole_tensor(tensor, layout),)
        for dim, axis in enumerate(layout.axes):
            if axis is not None:
                slices = self.slice_along(slices, axis, dim)
        return slices

    def export_tensor(self, slices: Slices, layout: TensorLayout) -> tf.Tensor:
        """Gathers the whole tensor on every core."""
        for dim, axis in enumerate(layout.axes):
            if axis is not None:
                slices = self.all_gather(slices, axis, dim)
        return slices[0]
