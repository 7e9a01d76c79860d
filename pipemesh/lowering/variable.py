"""Variables with named dims: one TensorFlow variable per slice, on the device of the slice."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend.operations import on_each
from pipemesh.errors import DeviceError, LayoutError, ShapeError
from pipemesh.lowering.lowering import Lowering, check_real, devices_of, join_slices, whole_tensor
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Shape, TensorLayout
from pipemesh.randomness.draws import RawDraw, draw_block

# Number of random numbers drawn at once, so that no device holds much more than its slice.
MOST_DRAWN = 1 << 22


# Computes a block of a variable's initial value, given the sizes of the variable, the begin and the
# sizes of the block, and the dtype.
Initializer = Callable[[Sequence[int], Sequence[int], Sequence[int], tf.DType], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Constant:
    """An initializer with the same number everywhere."""

    value: float = 0.0

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        del sizes, begin
        return tf.fill(list(block), tf.cast(self.value, dtype))


@dataclasses.dataclass(frozen=True)
class Normal:
    """An initializer of normal numbers with mean 0, from a seed of two integers.

    Example:
        >>> draw = Normal(stddev=0.02, seed=(1, 2))
        >>> whole = draw([4, 6], [0, 0], [4, 6], tf.float32)
        >>> part = draw([4, 6], [2, 3], [2, 3], tf.float32)
        >>> bool(tf.reduce_all(whole[2:, 3:] == part))
        True
    """

    stddev: float
    seed: tuple[int, int]

    def __post_init__(self) -> None:
        _check(self.seed, stddev=self.stddev)

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        raw = tf.raw_ops.StatelessRandomNormalV2
        return _draw(raw, sizes, begin, block, self.seed, dtype) * tf.cast(self.stddev, dtype)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """An initializer of uniform numbers in [low, high), from a seed of two integers."""

    low: float
    high: float
    seed: tuple[int, int]

    def __post_init__(self) -> None:
        _check(self.seed, low=self.low, high=self.high)

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        drawn = _draw(tf.raw_ops.StatelessRandomUniformV2, sizes, begin, block, self.seed, dtype)
        return drawn * tf.cast(self.high - self.low, dtype) + tf.cast(self.low, dtype)


def _check(seed: Any, **given: Any) -> None:
    for name, number in given.items():
        if not isinstance(number, numbers.Real):
            raise ShapeError(f"{name} of an initializer is {number!r}; give a number")
    if np.shape(seed) != (2,) or not all(isinstance(part, numbers.Integral) for part in seed):
        raise ShapeError(f"seed of an initializer is {seed!r}; give two integers, as in (1, 2)")


def _draw(
    raw: RawDraw,
    sizes: Sequence[int],
    begin: Sequence[int],
    block: Sequence[int],
    seed: tuple[int, int],
    dtype: tf.DType,
) -> tf.Tensor:
    """Draws a block, a few rows at a time if dims behind the first are split."""
    # `draw_block` draws all numbers of the dims behind the first with more than one row.
    dim = next((i for i, size in enumerate(block) if size > 1), len(block))
    behind = math.prod(sizes[dim + 1 :])
    is_whole = list(block[dim + 1 :]) == list(sizes[dim + 1 :])
    if is_whole or block[dim] * behind <= MOST_DRAWN:
        return draw_block(raw, sizes, begin, block, tf.constant(seed, tf.int64), dtype)
    step = max(1, MOST_DRAWN // behind)
    parts: list[tf.Tensor] = []
    for start in range(0, block[dim], step):
        begin_of_part, size_of_part = list(begin), list(block)
        begin_of_part[dim] += start
        size_of_part[dim] = min(step, block[dim] - start)
        parts.append(_draw(raw, sizes, begin_of_part, size_of_part, seed, dtype))
    return tf.concat(parts, dim)


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """A variable that is split by its layout.

    Processors that hold the same slice each have a copy. The copies stay equal because all get the
    same gradient (see `Lowering`).

    Attributes:
        name: the logical name, which does not depend on the layout.
        layout: the layout of the whole variable.
        variables: one per processor.

    Example:
        >>> from pipemesh.lowering import PlacementLowering
        >>> from pipemesh.lowering.variable import Constant
        >>> from pipemesh.mesh import LayoutRules, Mesh, Shape
        >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("hidden:model")
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> layout = lowering.tensor_layout(Shape.of(hidden=4))
        >>> w = Variable.create("w", layout, lowering.devices, Constant(1.0))
        >>> w.assign(w.tensor(lowering) * 3.0)
        >>> [tuple(part.shape) for part in w.variables], w.value().numpy().tolist()
        ([(2,), (2,)], [3.0, 3.0, 3.0, 3.0])
    """

    name: str
    layout: TensorLayout
    variables: tuple[tf.Variable, ...]

    __hash__ = object.__hash__

    def _refuse(self, *_: Any) -> Any:
        raise ShapeError(
            f"variable {self.name!r} has no lowering to compute with; take its values: "
            "variable.tensor(lowering), and change them by variable.assign(tensor)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __iter__ = __float__ = _refuse

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Variable):
            return self is other
        raise TypeError(
            f"variable {self.name!r} is compared with {other!r}; compare its elements: "
            "variable.tensor(lowering) == ..."
        )

    @classmethod
    def create(
        cls,
        name: str,
        layout: TensorLayout,
        devices: Sequence[str],
        initializer: Initializer,
        dtype: tf.DType = tf.float32,
        trainable: bool = True,
    ) -> Variable:
        """Creates the variables; each device computes its own initial value.

        Args:
            name: the logical name.
            layout: the layout of the whole variable.
            devices: the device of each processor.
            initializer: computes any block of the initial value.
            dtype: the dtype of the elements.
            trainable: whether gradient tapes watch the variables.

        Raises:
            DeviceError: the number of devices is not that of the mesh, or one does not exist.
            LayoutError: the layout or the initializer is missing.
            ShapeError: the dtype is complex.
        """
        if not isinstance(layout, TensorLayout):
            raise LayoutError(
                f"the layout is {layout!r}; write lowering.tensor_layout(shape), or "
                "rules.tensor_layout(shape, mesh)"
            )
        if not callable(initializer):
            raise LayoutError(
                f"the initializer is {initializer!r}; give one of pipemesh.lowering.variable, "
                "such as Constant(0.0)"
            )
        check_real(tf.as_dtype(dtype), f"variable {name!r}")
        devices = devices_of(layout.mesh, devices)
        variables: list[tf.Variable] = []
        for i, device in enumerate(devices):
            with tf.device(device):
                value = initializer(
                    layout.shape.sizes, layout.slice_begin(i), layout.slice_shape, dtype
                )
                variables.append(tf.Variable(value, trainable=trainable, name=name, dtype=dtype))
        return cls(name, layout, tuple(variables))

    def tensor(self, lowering: Lowering) -> Tensor:
        """Returns the current values under a placement that has all of the mesh's devices.

        The gradient of its slices flows to `variables`. In SIMD, the program of a core gets its
        slice as an argument instead.

        Args:
            lowering: must have the rules that the layout was made with.

        Raises:
            LayoutError: mesh or rules of `lowering` give another layout.
            DeviceError: the lowering is that of a core.
        """
        if not isinstance(lowering, Lowering):
            raise LayoutError(f"{lowering!r} is no lowering; give the one of the other tensors")
        layout = lowering.tensor_layout(self.layout.shape)
        if layout != self.layout:
            raise LayoutError(
                f"variable {self.name!r} lies on mesh '{self.layout.mesh}' as '{self.layout}', but "
                f"the lowering has mesh '{layout.mesh}' and rules '{lowering.rules}', by which it "
                f"would be '{layout}'; use the rules that it was created with, or create it anew "
                "and assign the whole: variable.value()"
            )
        if len(self.variables) != lowering.num_slices:
            raise DeviceError(
                f"variable {self.name!r} has {len(self.variables)} slices in this process, but the "
                f"lowering computes for {lowering.num_slices} processors; pass a core its slice"
            )
        devices = [variable.device for variable in self.variables]
        slices = on_each(devices, lambda variable: variable.read_value(), self.variables)
        return Tensor(lowering, tuple(slices), self.layout.shape)

    @property
    def shape(self) -> Shape:
        """Returns the shape of the whole variable."""
        return self.layout.shape

    @property
    def dtype(self) -> tf.DType:
        """Returns the dtype of the elements."""
        return self.variables[0].dtype

    def assign(self, value: Any) -> Any:
        """Changes the elements, each slice on its device.

        Args:
            value: a tensor with named dims of the same shape and layout, or a whole tensor or array
                in the order of the variable's dims.

        Returns:
            The assign operation in graphs; None in eager mode.

        Raises:
            ShapeError: the dims, their order or the dtype differ.
            LayoutError: a tensor with named dims has another layout.
            DeviceError: the tensor is one of a core.
        """
        devices, parts = [v.device for v in self.variables], self._parts_of(value)
        return tf.group(*on_each(devices, lambda v, part: v.assign(part), self.variables, parts))

    def _parts_of(self, value: Any) -> Sequence[tf.Tensor]:
        """Returns the slices of a new value, one per variable."""
        if not isinstance(value, Tensor):
            if not isinstance(value, tf.Tensor | tf.Variable):
                value = tf.convert_to_tensor(value, self.dtype)
            whole = whole_tensor(value, self.layout)
            self._check_dtype(whole.dtype)
            sizes = self.layout.slice_shape
            processors = range(len(self.variables))
            return [tf.slice(whole, self.layout.slice_begin(i), sizes) for i in processors]
        if value.shape != self.shape:
            raise ShapeError(
                f"variable {self.name!r} is '{self.shape}', but {value!r} is assigned; ops.rename "
                "or ops.transpose it"
            )
        self._check_dtype(value.dtype)
        if value.layout != self.layout:
            raise LayoutError(
                f"variable {self.name!r} lies on mesh '{self.layout.mesh}' as '{self.layout}', but "
                f"{value!r} of mesh '{value.layout.mesh}' is assigned; use one mesh and one set of "
                "rules, or assign the whole: ops.export_tensor(x)"
            )
        if len(value.slices) != len(self.variables):
            raise DeviceError(
                f"variable {self.name!r} has {len(self.variables)} slices in this process, but "
                f"{value!r} has {len(value.slices)}; a core returns its slice, x.slices[0], to be "
                "assigned outside of its program"
            )
        return value.slices

    def _check_dtype(self, dtype: tf.DType) -> None:
        if dtype != self.dtype:
            raise ShapeError(
                f"variable {self.name!r} is {self.dtype.name}, but {dtype.name} is assigned; "
                "ops.cast it"
            )

    def value(self) -> tf.Tensor:
        """Joins the whole variable on the current device."""
        return join_slices(self.layout, lambda processor: self.variables[processor].read_value())
