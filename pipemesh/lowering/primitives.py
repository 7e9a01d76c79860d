"""Communication primitives on slices; the gradient of each is another primitive."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import LayoutError
from pipemesh.lowering.costs import CommunicationCosts
from pipemesh.mesh import Mesh

# One tensor per processor that this program computes for: all processors in placement, one in SIMD.
Slices = tuple[tf.Tensor, ...]
# Reductions; only the sum has a gradient.
REDUCTIONS = ("sum", "max", "min")


class Primitives(abc.ABC):
    """Local computation, and communication with gradients.

    The law of gradients: where a value is equal along an axis, every processor along the axis holds
    a copy of it. In the backward pass each holds a copy of its *whole* gradient. `all_reduce` makes
    values equal, so its gradient is the identity. `vary` lets an equal value enter computation that
    differs along the axis, so its gradient sums over the axis. These are f and g of Shoeybi et al.,
    "Megatron-LM", 2019.

    `all_gather` and `slice_along` are each other's gradient for the same reason. The gradients of
    `all_to_all` and `permute` are their reversals. If each processor needs only a slice of a sum,
    the sum is a `reduce_scatter`. Its counterpart `gather_varied` is an all-gather whose gradient
    is a reduce-scatter (Korthikanti et al., "Reducing Activation Recomputation", 2022).

    The law also holds for gradients of gradients: the backward pass consists of the same
    primitives, each with its own gradient. The methods `raw_...` have none.

    An axis of size 1 causes no communication.

    Attributes:
        mesh: the mesh.
        costs: counts the communication while the program is built.
    """

    mesh: Mesh
    costs: CommunicationCosts

    @abc.abstractmethod
    def map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function to the slices of each processor.

        Args:
            function: takes one tensor per operand; must be pure and depend on its arguments alone.
                On a mesh of several processors it may not draw random numbers (LayoutError).
            *operands: may be empty if `function` makes a constant.

        Raises:
            GradientError: `function` uses a trainable variable, or a floating tensor that is
                neither a constant nor from `tf.stop_gradient`. Eager mode does not detect tensors.
        """

    @abc.abstractmethod
    def coordinate(self, axis: str) -> Slices:
        """Returns each processor's coordinate along an axis, as int32 scalars."""

    @abc.abstractmethod
    def with_gradient(
        self,
        forward: Callable[[Slices], Slices],
        backward: Callable[[Slices], Slices],
        slices: Slices,
    ) -> Slices:
        """Computes `forward(slices)` with the gradient that `backward` computes.

        `forward` may call the methods `raw_...`, which have no gradient. For gradients of
        gradients, `backward` must call methods that have one.
        """

    @abc.abstractmethod
    def raw_map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies `map` without the handling of gradients."""

    @abc.abstractmethod
    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Reduces over the processors that differ along `axes`."""

    @abc.abstractmethod
    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins the slices along an axis in the dim at position `dim`."""

    @abc.abstractmethod
    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Cuts along `split_dim`, sends each processor a piece, and joins along `concat_dim`."""

    @abc.abstractmethod
    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Sends slices from coordinate to coordinate; processors that receive nothing get zeros."""

    def raw_reduce_scatter(self, x: Slices, axis: str, dim: int) -> Slices:
        """Sums over an axis and gives each processor its slice of the sum.

        The pieces travel by an all-to-all, which sends no more than a reduce-scatter needs.
        """
        pieces = self.raw_map(lambda tensor: tensor[tf.newaxis], x)
        pieces = self.raw_all_to_all(pieces, axis, split_dim=dim + 1, concat_dim=0)
        return self.raw_map(lambda tensor: tf.reduce_sum(tensor, 0), pieces)

    def group_size(self, axes: Sequence[str]) -> int:
        """Returns the number of processors that differ along `axes`."""
        return math.prod(self.mesh.size(axis) for axis in axes)

    def _wide(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the axes with more than one coordinate, in the order of the mesh."""
        for axis in axes:
            self.mesh.check_axis(axis)
        return tuple(a for a in self.mesh.axis_names if a in axes and self.mesh.size(a) > 1)

    def _count(self, primitive: str, axes: Sequence[str], x: tf.Tensor, backward: bool) -> None:
        self.costs.add(primitive, axes, x, backward)

    # The gradient of each primitive is another one. `backward` selects the pass in the costs.

    def _reduce(self, x: Slices, axes: Sequence[str], op: str, backward: bool) -> Slices:
        def forward(y: Slices) -> Slices:
            self._count("all_reduce", axes, y[0], backward)
            return self.raw_all_reduce(y, axes, op)

        return self.with_gradient(forward, lambda grad: self._vary(grad, axes), x)

    def _vary(self, x: Slices, axes: Sequence[str]) -> Slices:
        return self.with_gradient(
            lambda y: y, lambda grad: self._reduce(grad, axes, "sum", backward=True), x
        )

    def _gather(self, x: Slices, axis: str, dim: int, backward: bool) -> Slices:
        def forward(y: Slices) -> Slices:
            self._count("all_gather", [axis], y[0], backward)
            return self.raw_all_gather(y, axis, dim)

        return self.with_gradient(forward, lambda grad: self._slice(grad, axis, dim), x)

    def _slice(self, x: Slices, axis: str, dim: int) -> Slices:
        return self.with_gradient(
            lambda y: self._raw_slice(y, axis, dim),
            lambda grad: self._gather(grad, axis, dim, backward=True),
            x,
        )

    def _reduce_scatter(self, x: Slices, axis: str, dim: int, backward: bool) -> Slices:
        def forward(y: Slices) -> Slices:
            self._count("reduce_scatter", [axis], y[0], backward)
            return self.raw_reduce_scatter(y, axis, dim)

        return self.with_gradient(
            forward, lambda grad: self._gather_varied(grad, axis, dim, backward=True), x
        )

    def _gather_varied(self, x: Slices, axis: str, dim: int, backward: bool) -> Slices:
        def forward(y: Slices) -> Slices:
            self._count("all_gather", [axis], y[0], backward)
            return self.raw_all_gather(y, axis, dim)

        return self.with_gradient(
            forward, lambda grad: self._reduce_scatter(grad, axis, dim, backward=True), x
        )

    def _exchange(
        self, x: Slices, axis: str, split_dim: int, concat_dim: int, backward: bool
    ) -> Slices:
        def forward(y: Slices) -> Slices:
            self._count("all_to_all", [axis], y[0], backward)
            return self.raw_all_to_all(y, axis, split_dim, concat_dim)

        return self.with_gradient(
            forward, lambda grad: self._exchange(grad, axis, concat_dim, split_dim, True), x
        )

    def _send(
        self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]], backward: bool
    ) -> Slices:
        def forward(y: Slices) -> Slices:
            self._count("permute", [axis], y[0], backward)
            return self.raw_permute(y, axis, pairs)

        back = tuple((b, a) for a, b in pairs)
        return self.with_gradient(forward, lambda grad: self._send(grad, axis, back, True), x)

    def _raw_slice(self, x: Slices, axis: str, dim: int) -> Slices:
        parts = self.mesh.size(axis)

        def cut(tensor: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
            sizes = static_sizes(tensor)
            sizes[dim] //= parts
            begin = [at * sizes[dim] if i == dim else 0 for i in range(len(sizes))]
            return tf.slice(tensor, tf.stack(begin), sizes)

        return self.raw_map(cut, x, self.coordinate(axis))

    def all_reduce(self, x: Slices, axes: Sequence[str], op: str = "sum") -> Slices:
        """Reduces over axes, so that the result is equal along them.

        Args:
            x: values that differ along `axes`.
            axes: may be empty.
            op: `"sum"`, or `"max"` or `"min"`, which have no gradient.

        Returns:
            The reduced value on every processor. Gradient: the identity.
        """
        if op not in REDUCTIONS:
            raise ValueError(f"no reduction is called {op!r}; known: {', '.join(REDUCTIONS)}")
        wide = self._wide(axes)
        if op != "sum":
            x = self.map(tf.stop_gradient, x)
        if not wide:
            return x
        return self._reduce(x, wide, op, backward=False)

    def vary(self, x: Slices, axes: Sequence[str]) -> Slices:
        """Lets a value that is equal along axes enter computation that differs along them.

        Args:
            x: a value that is equal along `axes`.
            axes: may be empty.

        Returns:
            The same values. Gradient: the sum over `axes`.
        """
        wide = self._wide(axes)
        if not wide or not x[0].dtype.is_floating:
            return x
        return self._vary(x, wide)

    def all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins the slices of a dim that is split over an axis.

        Args:
            x: slices.
            axis: the axis that splits `dim`.
            dim: its position in the tensor.

        Returns:
            The whole dim on every processor. Gradient: the processor's slice.
        """
        if not self._wide([axis]):
            return x
        return self._gather(x, axis, dim, backward=False)

    def reduce_scatter(self, x: Slices, axis: str, dim: int) -> Slices:
        """Sums over an axis and splits a dim of the sum over it.

        Args:
            x: values that differ along `axis`.
            axis: the axis to sum over.
            dim: position of the dim to split; its size must be a multiple of the axis size.

        Returns:
            Each processor's slice of the sum. Gradient: all-gather.
        """
        if not self._wide([axis]):
            return x
        self._check_divides(x, axis, dim)
        return self._reduce_scatter(x, axis, dim, backward=False)

    def gather_varied(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins the slices of a dim for computation that differs along the axis.

        The result equals `vary` after `all_gather`, but the gradient is sent once.

        Args:
            x: slices.
            axis: the axis that splits `dim`.
            dim: its position in the tensor.

        Returns:
            The whole dim on every processor. Gradient: reduce-scatter.
        """
        if not self._wide([axis]):
            return x
        return self._gather_varied(x, axis, dim, backward=False)

    def slice_along(self, x: Slices, axis: str, dim: int) -> Slices:
        """Splits a dim over an axis along which the value is equal.

        Args:
            x: a value that is equal along `axis`.
            axis: the axis to split `dim` over.
            dim: its position in the tensor; its size must be a multiple of the axis size.

        Returns:
            Each processor's slice. Gradient: all-gather.
        """
        if not self._wide([axis]):
            return x
        self._check_divides(x, axis, dim)
        return self._slice(x, axis, dim)

    def all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Moves a split from one dim to another.

        Args:
            x: slices of a tensor whose `concat_dim` is split over `axis`.
            axis: the axis.
            split_dim: position of the dim to split.
            concat_dim: position of the dim to join.

        Returns:
            The new slices. Gradient: the reverse move.
        """
        if not self._wide([axis]):
            return x
        self._check_divides(x, axis, split_dim)
        return self._exchange(x, axis, split_dim, concat_dim, backward=False)

    def permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Sends slices along an axis.

        Args:
            x: slices.
            axis: the axis.
            pairs: source and target coordinates; each source and each target occurs at most once.

        Returns:
            The received slices, or zeros on processors that receive nothing. Gradient: the reverse
            move.
        """
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        size = self.mesh.size(axis)
        if any(
            len(set(ends)) < len(ends) or not all(0 <= end < size for end in ends)
            for ends in (sources, targets)
        ):
            raise LayoutError(
                f"{list(pairs)} is no permutation along axis {axis!r} of size {size}: coordinates "
                "go from 0 to the size, and none may be source or target twice"
            )
        pairs = tuple(pairs)
        if not self._wide([axis]):
            return x if pairs else self.map(tf.zeros_like, x)
        return self._send(x, axis, pairs, backward=False)

    def shift(self, x: Slices, axis: str, offset: int, wrap: bool) -> Slices:
        """Sends slices `offset` coordinates up an axis.

        Args:
            x: slices.
            axis: the axis.
            offset: may be negative.
            wrap: whether slices that leave at one end enter at the other; otherwise zeros enter.

        Returns:
            The received slices. Gradient: the reverse move.
        """
        return self.permute(x, axis, self._shift_pairs(axis, offset, wrap))

    def raw_circle(self, x: Slices, axis: str, offset: int, backward: bool) -> Slices:
        """Shifts like `shift` with `wrap`, on an axis of size above 1, without a gradient."""
        pairs = self._shift_pairs(axis, offset, wrap=True)
        self.costs.add("permute", [axis], x[0], backward)
        return self.raw_permute(x, axis, pairs)

    def _shift_pairs(self, axis: str, offset: int, wrap: bool) -> list[tuple[int, int]]:
        size = self.mesh.size(axis)
        return [(i, (i + offset) % size) for i in range(size) if wrap or 0 <= i + offset < size]

    def _check_divides(self, x: Slices, axis: str, dim: int) -> None:
        size = static_sizes(x[0])[dim]
        if size % self.mesh.size(axis):
            raise LayoutError(
                f"a dim of size {size} cannot be cut into {self.mesh.size(axis)} equal slices "
                f"over axis {axis!r} of mesh '{self.mesh}'; change the rule that names this axis"
            )
