"""A weight inside a loop whose gradient is summed over copies after the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.tensor import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class StageWeight(Tensor):
    """A weight that is equal along axes and sums its gradient over them once, after a loop.

    Data-parallel copies of a weight sum their gradients wherever the weight meets activations. In a
    loop that would be one all-reduce per tick. Here `vary` returns a tensor made from `partial`,
    whose gradient is one processor's contribution to the sum. Uses that do not vary, such as a norm
    of the weight, read `slices`, whose gradient is complete on each processor.

    Attributes:
        partial: the same values as `slices`.
        summed_later: the axes.
    """

    partial: Slices
    summed_later: tuple[str, ...]

    def vary(self, axes: Sequence[str]) -> Slices:
        """Returns the slices, marked as different along all of `axes` (see `Lowering.vary`)."""
        lacking = [axis for axis in axes if axis not in self.split_axes]
        if self.summed_later and set(self.summed_later) <= set(lacking):
            rest = [axis for axis in lacking if axis not in self.summed_later]
            return self.lowering.vary(self.partial, rest)
        return self.lowering.vary(self.slices, lacking)
