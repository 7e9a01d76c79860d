"""The interface of all lowerings: local computation on slices, communication, and its costs."""

from __future__ import annotations

import abc
import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from pipemesh.backend.devices import check_devices_exist
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import DeviceError, LayoutError, ShapeError
from pipemesh.lowering.costs import OperationCosts, count_map
from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout
from pipemesh.mesh.mesh import check_mesh
from pipemesh.randomness.scope import slicewise
from pipemesh.text import almost_equal

T = TypeVar("T")
# One tensor per processor that this program computes for: all processors in placement, one in SIMD.
Slices = tuple[tf.Tensor, ...]
# Reductions; only the sum has a gradient.
REDUCTIONS = ("sum", "max", "min")


def check_rules(rules: Any) -> None:
    """Raises a LayoutError unless the value is a `LayoutRules`."""
    if not isinstance(rules, LayoutRules):
        raise LayoutError(
            f"the layout rules are {rules!r}; write LayoutRules.from_text('batch:data'), or "
            "LayoutRules() for none"
        )


def check_real(dtype: tf.DType, what: str) -> None:
    """Checks for real numbers or booleans: complex gradients would depend on the layout."""
    if dtype.is_complex:
        raise ShapeError(
            f"{what} is {dtype.name}; elements are real numbers or booleans. Use two tensors, "
            "tf.math.real(z) and tf.math.imag(z)"
        )


def whole_tensor(tensor: Any, layout: TensorLayout) -> tf.Tensor:
    """Converts a whole tensor and checks its dtype and sizes, at run time if they are unknown."""
    tensor = tf.convert_to_tensor(tensor)
    shape = layout.shape
    check_real(tensor.dtype, f"a tensor of shape '{shape}'")
    if not tensor.shape.is_compatible_with(shape.sizes):
        raise ShapeError(f"a tensor of sizes {tensor.shape} cannot have the shape '{shape}'")
    if tensor.shape.is_fully_defined():
        return tensor
    # The name appears in TensorFlow's error.
    sizes = ".".join(f"{dim.name}_{dim.size}" for dim in shape)
    return tf.ensure_shape(tensor, shape.sizes, name=f"import_tensor_{sizes}")


def join_slices(layout: TensorLayout, slice_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
    """Joins the slices of the whole tensor, one copy of each, by their processors."""

    def join(dim: int, coordinates: dict[str, int]) -> tf.Tensor:
        if dim == len(layout.axes):
            return slice_of(layout.mesh.processor(coordinates))
        axis = layout.axes[dim]
        if axis is None:
            return join(dim + 1, coordinates)
        parts = [join(dim + 1, {**coordinates, axis: i}) for i in range(layout.mesh.size(axis))]
        return tf.concat(parts, dim)

    return join(0, {})


def devices_of(
    mesh: Mesh, devices: Sequence[str], members: str = "processors", each: str = "each"
) -> tuple[str, ...]:
    """Returns TensorFlow's names of a mesh's devices, after a check that there is one for each."""
    names = check_devices_exist(devices)
    if len(names) != mesh.num_devices:
        raise DeviceError(
            f"{len(names)} devices were given for mesh '{mesh}', which has {mesh.num_devices} "
            f"{members}; give one device for {each}"
        )
    return names


class Lowering(abc.ABC):
    """The base of objects that turn operations on named dims into TensorFlow operations.

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

    Primitives take `x`, the slices of a tensor. `axis` is the name of a mesh axis, along which
    processors communicate; an axis of size 1 causes no communication. `dim` is the position of a
    dim in the tensor. If a primitive splits a dim, its size must be a multiple of the axis size.

    Attributes:
        mesh: the mesh.
        rules: the layout rules.
        costs: counts communication and computation while the program is built.
        num_slices: the number of processors that this program computes for.

    Raises:
        LayoutError: a rule names an unknown axis.
    """

    num_slices: int

    def __init__(self, mesh: Mesh, rules: LayoutRules) -> None:
        check_mesh(mesh)
        check_rules(rules)
        rules.check(mesh)
        self.mesh = mesh
        self.rules = rules
        self.costs = OperationCosts(mesh)
        # The dims of all tensors so far with their sizes, and the rules that caused a warning.
        self._dims: dict[str, set[int]] = {}
        self._warned: set[str] = set()
        # Whether calls now are those of a gradient, for `costs`.
        self._is_backward = False

    @abc.abstractmethod
    def import_tensor(self, tensor: tf.Tensor, layout: TensorLayout) -> Slices:
        """Cuts a whole tensor into slices; the gradient is whole again."""

    @abc.abstractmethod
    def export_tensor(self, slices: Slices, layout: TensorLayout) -> tf.Tensor:
        """Joins slices to the whole tensor, each element from one copy."""

    def computing_slices(self) -> contextlib.AbstractContextManager[None]:
        """Marks a call of a function of slices, which has no access to whole tensors."""
        if self.mesh.num_devices == 1:
            return contextlib.nullcontext()
        return slicewise(
            f"is called inside of Lowering.map on mesh '{self.mesh}', where each processor would "
            "draw for its own slice, so that the numbers would depend on the layout; draw with "
            "ops.dropout, ops.random_uniform or ops.random_normal, which know the layout, and give "
            "map the slices of what they return"
        )

    def tensor_layout(self, shape: Shape) -> TensorLayout:
        """Returns the layout of a tensor under the rules.

        Raises:
            LayoutError: the rules cannot split the tensor.
        """
        layout = self.rules.tensor_layout(shape, self.mesh)
        for dim in shape:
            self._dims.setdefault(dim.name, set()).add(dim.size)
        return layout

    @property
    def dims(self) -> dict[str, set[int]]:
        """Returns the dims of all tensors so far, with their sizes."""
        return dict(self._dims)

    def check_rules(self) -> None:
        """Checks at the end of a program that some tensor had each dim that a rule names.

        Raises:
            LayoutError: a rule names a dim that no tensor had; the message suggests a name.

        Example:
            >>> from pipemesh.lowering import PlacementLowering, ops
            >>> mesh, rules = Mesh.from_text("data:1"), LayoutRules.from_text("bacth:data")
            >>> lowering = PlacementLowering(mesh, rules, ["CPU:0"])
            >>> x = ops.import_tensor(lowering, [1.0, 2.0], "batch:2")
            >>> lowering.check_rules()
            Traceback (most recent call last):
            pipemesh.errors.LayoutError: rule 'bacth:data' names dim 'bacth', which no tensor has; \
did you mean 'batch'? Known: 'batch'
        """
        self.rules.check(self.mesh, self._dims)

    def warn_of_misspelt_rules(self) -> None:
        """Warns once of each rule that names no known dim but resembles a dim without a rule.

        Operations that return results call it. Other rules without a matching dim may be meant for
        other programs; only `check_rules` reports them.
        """
        free = [name for name in self._dims if self.rules.axis(name) is None]
        for dim, axis in self.rules.rules:
            near = almost_equal(dim, free) or next((n for n in free if n in dim.split("_")), None)
            if dim in self._dims or dim in self._warned or near is None:
                continue
            self._warned.add(dim)
            warnings.warn(
                f"rule '{dim}:{axis}' names dim {dim!r}, which no tensor of the program has had; "
                f"dim {near!r}, which has no rule, is not split. Did you mean '{near}:{axis}'?",
                stacklevel=3,
            )

    def map(
        self, function: Callable[..., tf.Tensor], *operands: Slices, flops: int | None = None
    ) -> Slices:
        """Applies a local function to the slices of each processor, and counts its work.

        Args:
            function: takes one tensor per operand; must be pure and depend on its arguments alone.
                On a mesh of several processors it may not draw random numbers (LayoutError).
            *operands: may be empty if `function` makes a constant.
            flops: of one processor; by default as `OperationCosts` describes.

        Raises:
            GradientError: `function` uses a trainable variable, or a floating tensor that is
                neither a constant nor from `tf.stop_gradient`. Eager mode does not detect tensors.
        """
        result = self.map_to_several(lambda *args: [function(*args)], *operands)[0]
        self.count(operands, result, flops)
        return result

    def count(self, operands: Sequence[Slices], result: Slices, flops: int | None = None) -> None:
        """Counts the work of a function of slices, as `map` does."""
        one = [slices[0] for slices in operands]
        count_map(self.costs, one, result[0], flops, self._is_backward)

    @abc.abstractmethod
    def map_to_several(
        self, function: Callable[..., Sequence[tf.Tensor]], *operands: Slices
    ) -> list[Slices]:
        """Applies a local function that returns several tensors, as `map`, without counting."""

    @abc.abstractmethod
    def coordinate(self, axis: str) -> Slices:
        """Returns each processor's coordinate along an axis, as int32 scalars."""

    @abc.abstractmethod
    def with_gradient(
        self,
        forward: Callable[..., Slices],
        backward: Callable[[Slices], Sequence[Slices]],
        *operands: Slices,
    ) -> Slices:
        """Computes `forward(*operands)` with the gradients that `backward` computes.

        `forward` may call the methods `raw_...`, which have no gradient. `backward` takes the
        gradient of the result, and returns those of all operands. For gradients of gradients, it
        must call methods that have one. Operands are all floating or all not.
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

    def raw_slice(self, x: Slices, axis: str, dim: int) -> Slices:
        """Takes each processor's part of a dim."""
        parts = self.mesh.size(axis)

        def cut(tensor: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
            sizes = static_sizes(tensor)
            sizes[dim] //= parts
            begin = [at * sizes[dim] if i == dim else 0 for i in range(len(sizes))]
            return tf.slice(tensor, tf.stack(begin), sizes)

        return self.raw_map(cut, x, self.coordinate(axis))

    def group_size(self, axes: Sequence[str]) -> int:
        """Returns the number of processors that differ along `axes`."""
        return math.prod(self.mesh.size(axis) for axis in axes)

    def _wide(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the axes with more than one coordinate, in the order of the mesh."""
        for axis in axes:
            self.mesh.check_axis(axis)
        return tuple(a for a in self.mesh.axis_names if a in axes and self.mesh.size(a) > 1)

    def _count(self, primitive: str, axes: Sequence[str], x: tf.Tensor) -> None:
        self.costs.add(primitive, axes, x, self._is_backward)

    def _primitive(
        self,
        name: str | None,
        axes: Sequence[str],
        raw: Callable[[Slices], Slices],
        gradient: Callable[[Slices], Slices],
        x: Slices,
    ) -> Slices:
        """Computes a primitive whose gradient is another one, and counts it if it has a name."""
        if not axes:
            return x

        def forward(y: Slices) -> Slices:
            if name is not None:
                self._count(name, axes, y[0])
            return raw(y)

        return self.with_gradient(forward, lambda grad: [self.in_backward(gradient, grad)], x)

    def in_backward(self, gradient: Callable[..., T], *grads: Any) -> T:
        """Calls a gradient, whose work and traffic count as those of the backward pass."""
        outside, self._is_backward = self._is_backward, True
        try:
            return gradient(*grads)
        finally:
            self._is_backward = outside

    def all_reduce(self, x: Slices, axes: Sequence[str], op: str = "sum") -> Slices:
        """Reduces over axes along which values differ. Gradient: the identity.

        Args:
            x: slices.
            axes: may be empty.
            op: `"sum"`, or `"max"` or `"min"`, which have no gradient.

        Returns:
            The reduced value on every processor.
        """
        if op not in REDUCTIONS:
            raise ValueError(f"no reduction is called {op!r}; known: {', '.join(REDUCTIONS)}")
        wide = self._wide(axes)
        if op != "sum":
            x = self.map(tf.stop_gradient, x)
        return self._primitive(
            "all_reduce",
            wide,
            lambda y: self.raw_all_reduce(y, wide, op),
            lambda grad: self.vary(grad, wide),
            x,
        )

    def vary(self, x: Slices, axes: Sequence[str]) -> Slices:
        """Lets a value that is equal along axes enter computation that differs along them.

        Gradient: the sum over `axes`, which may be empty.
        """
        wide = self._wide(axes)
        return self._primitive(None, wide, lambda y: y, lambda grad: self.all_reduce(grad, wide), x)

    def all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins a dim that is split over an axis, on every processor.

        Gradient: the processor's slice.
        """
        return self._primitive(
            "all_gather",
            self._wide([axis]),
            lambda y: self.raw_all_gather(y, axis, dim),
            lambda grad: self.slice_along(grad, axis, dim),
            x,
        )

    def reduce_scatter(self, x: Slices, axis: str, dim: int) -> Slices:
        """Sums over an axis and splits a dim of the sum over it. Gradient: all-gather."""
        self._check_divides(x, axis, dim)
        return self._primitive(
            "reduce_scatter",
            self._wide([axis]),
            lambda y: self.raw_reduce_scatter(y, axis, dim),
            lambda grad: self.gather_varied(grad, axis, dim),
            x,
        )

    def gather_varied(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins a split dim for computation that differs along the axis.

        The result equals `vary` after `all_gather`, but the gradient is sent once. Gradient:
        reduce-scatter.
        """
        return self._primitive(
            "all_gather",
            self._wide([axis]),
            lambda y: self.raw_all_gather(y, axis, dim),
            lambda grad: self.reduce_scatter(grad, axis, dim),
            x,
        )

    def slice_along(self, x: Slices, axis: str, dim: int) -> Slices:
        """Splits a dim over an axis along which the value is equal. Gradient: all-gather."""
        self._check_divides(x, axis, dim)
        return self._primitive(
            None,
            self._wide([axis]),
            lambda y: self.raw_slice(y, axis, dim),
            lambda grad: self.all_gather(grad, axis, dim),
            x,
        )

    def all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Moves the split over an axis from the dim `concat_dim` to `split_dim`.

        Gradient: the reverse move.
        """
        self._check_divides(x, axis, split_dim)
        return self._primitive(
            "all_to_all",
            self._wide([axis]),
            lambda y: self.raw_all_to_all(y, axis, split_dim, concat_dim),
            lambda grad: self.all_to_all(grad, axis, concat_dim, split_dim),
            x,
        )

    def permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Sends slices along an axis. Gradient: the reverse move.

        Args:
            x: slices.
            axis: the axis.
            pairs: source and target coordinates; each source and each target occurs at most once.

        Returns:
            The received slices, or zeros on processors that receive nothing.

        Raises:
            LayoutError: a coordinate is invalid or occurs twice.
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
        if not pairs and size == 1:
            return self.map(tf.zeros_like, x)
        return self._primitive(
            "permute",
            self._wide([axis]),
            lambda y: self.raw_permute(y, axis, pairs),
            lambda grad: self.permute(grad, axis, [(b, a) for a, b in pairs]),
            x,
        )

    def shift(self, x: Slices, axis: str, offset: int, wrap: bool) -> Slices:
        """Sends slices `offset` coordinates up an axis. Gradient: the reverse move.

        With `wrap` slices that leave at one end enter at the other; otherwise zeros enter.
        """
        return self.permute(x, axis, self._shift_pairs(axis, offset, wrap))

    def raw_circle(self, x: Slices, axis: str, offset: int, backward: bool | None = None) -> Slices:
        """Shifts like `shift` with `wrap`, on an axis of size above 1, without a gradient."""
        pairs = self._shift_pairs(axis, offset, wrap=True)
        self.costs.add("permute", [axis], x[0], self._is_backward if backward is None else backward)
        return self.raw_permute(x, axis, pairs)

    def _shift_pairs(self, axis: str, offset: int, wrap: bool) -> list[tuple[int, int]]:
        size = self.mesh.size(axis)
        return [(i, (i + offset) % size) for i in range(size) if wrap or 0 <= i + offset < size]

    def _check_divides(self, x: Slices, axis: str, dim: int) -> None:
        size, parts = x[0].shape[dim], self.mesh.size(axis)
        if size is not None and size % parts:
            raise LayoutError(
                f"a dim of size {size} cannot be cut into {parts} equal slices over axis {axis!r} "
                f"of mesh '{self.mesh}'; change the rule that names this axis"
            )
