"""Layouts: the mesh axis over which each dim is split."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from pipemesh.errors import LayoutError
from pipemesh.mesh.checks import is_name, pairs_of, text_of
from pipemesh.mesh.mesh import Mesh, check_mesh
from pipemesh.mesh.shape import Shape
from pipemesh.text import nearest_text

_RULE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*:\s*([A-Za-z_][A-Za-z0-9_]*)\s*")


@dataclasses.dataclass(frozen=True)
class LayoutRules:
    """The global map from dims to mesh axes; a dim without a rule is whole on every device.

    Attributes:
        rules: pairs of dim name and axis name.

    Raises:
        LayoutError: a dim is split over two axes.

    Example:
        >>> rules = LayoutRules.from_text("batch:data;heads:model")
        >>> rules.axis("heads"), rules.axis("io"), str(rules)
        ('model', None, 'batch:data;heads:model')
    """

    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if pairs_of(self.rules) is None:
            raise LayoutError(
                f"layout rules are {self.rules!r}, but must be pairs of dim and axis; write "
                "LayoutRules.from_text('batch:data;heads:model')"
            )
        for dim, axis in self.rules:
            if not (is_name(dim) and is_name(axis)):
                raise LayoutError(
                    f"the rule {(dim, axis)!r} is not a pair of names; write for example "
                    "('batch', 'data')"
                )
            others = [other for name, other in self.rules if name == dim and other != axis]
            if others:
                raise LayoutError(
                    f"dim {dim!r} is split over axis {axis!r} and over axis {others[0]!r}; a dim "
                    f"has one axis, so remove '{dim}:{axis}' or '{dim}:{others[0]}'"
                )
        object.__setattr__(self, "rules", tuple(dict.fromkeys(map(tuple, self.rules))))

    @classmethod
    def from_text(cls, text: str) -> LayoutRules:
        """Returns the rules of a text: `dim:axis` pairs joined by semicolons; empty for no rules.

        Raises:
            LayoutError: `text` has another form.
        """
        if not text_of(text, LayoutError, "batch:data;heads:model").strip():
            return cls()
        rules: list[tuple[str, str]] = []
        for part in text.split(";"):
            match = _RULE.fullmatch(part)
            if match is None:
                raise LayoutError(
                    f"{part!r} in layout {text!r} is not dim:axis; "
                    "write for example 'batch:data' or 'batch:data;heads:model'"
                )
            rules.append((match[1], match[2]))
        return cls(tuple(rules))

    def axis(self, dim: str) -> str | None:
        """Returns the axis that a dim is split over; None if it is whole on every device."""
        return dict(self.rules).get(dim)

    def check(self, mesh: Mesh, dims: Iterable[str] | None = None) -> None:
        """Checks that the mesh has every axis, and unless they are None that `dims` hold every dim.

        Raises:
            LayoutError: a rule names an axis or a dim that is unknown.
        """
        check_mesh(mesh)
        known = None if dims is None else list(dict.fromkeys(dims))
        for dim, axis in self.rules:
            if axis not in mesh.axis_names:
                raise LayoutError(
                    f"rule '{dim}:{axis}' names axis {axis!r}, which mesh '{mesh}' does not "
                    f"have{nearest_text(axis, mesh.axis_names)}"
                )
            if known is not None and dim not in known:
                raise LayoutError(
                    f"rule '{dim}:{axis}' names dim {dim!r}, which no tensor "
                    f"has{nearest_text(dim, known)}"
                )

    def tensor_layout(self, shape: Shape, mesh: Mesh) -> TensorLayout:
        """Returns the layout of one tensor under the rules.

        Raises:
            LayoutError: two dims of `shape` are split over one axis, a size does not divide, or a
                rule for one of the dims names an axis that `mesh` does not have.
        """
        if not isinstance(shape, Shape) or not isinstance(mesh, Mesh):  # type: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(
                f"no layout of {shape!r} on {mesh!r}; give a Shape and a Mesh: "
                "rules.tensor_layout(shape, mesh) with Shape.from_text('batch:4') and "
                "Mesh.from_text('data:2')"
            )
        rules = LayoutRules(tuple(rule for rule in self.rules if rule[0] in shape.names))
        rules.check(mesh)
        return TensorLayout(shape, mesh, tuple(rules.axis(name) for name in shape.names))

    def __str__(self) -> str:
        return ";".join(f"{dim}:{axis}" for dim, axis in self.rules)


# A mesh has no longer axes in practice.
_LONGEST_AXIS = 512


def _divisors(size: int) -> str:
    """Lists the sizes of an axis that divide the size of a dim, as text."""
    return ", ".join(str(n) for n in range(1, min(size, _LONGEST_AXIS) + 1) if size % n == 0)


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The axes over which the dims of one tensor are split, and the slice of each processor.

    Along an axis over which no dim is split, all processors hold equal slices.

    Attributes:
        shape: of the whole tensor.
        mesh: the mesh.
        axes: for each dim of `shape` the axis that it is split over, or None.

    Raises:
        LayoutError: two dims are split over one axis, or a size does not divide.

    Example:
        >>> mesh = Mesh.from_text("rows:2;cols:4")
        >>> layout = TensorLayout(Shape.of(batch=100, channels=3), mesh, ("cols", None))
        >>> layout.slice_shape, layout.slice_begin(3)
        ((25, 3), (75, 0))
    """

    shape: Shape
    mesh: Mesh
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise LayoutError(
                f"{len(self.axes)} axes were given for the {len(self.shape)} dims of "
                f"'{self.shape}'; give one axis or None for each dim"
            )
        for dim, axis in zip(self.shape, self.axes, strict=True):
            if axis is None:
                continue
            same = [name for name, other in zip(self.shape.names, self.axes, strict=True)
                    if other == axis]  # fmt: skip
            if len(same) > 1:
                raise LayoutError(
                    f"dims {same[0]!r} and {same[1]!r} of the tensor '{self.shape}' are both split "
                    f"over axis {axis!r} of mesh '{self.mesh}'; remove or change the rule "
                    f"'{same[0]}:{axis}' or '{same[1]}:{axis}', or rename one of the dims"
                )
            parts = self.mesh.size(axis)
            if dim.size % parts:
                raise LayoutError(
                    f"dim {dim.name!r} of the tensor '{self.shape}' has size {dim.size}, which "
                    f"axis {axis!r} of mesh '{self.mesh}' cannot cut into {parts} equal slices; "
                    f"remove or change the rule '{dim.name}:{axis}', or make the size a multiple "
                    f"of {parts}, or that of the axis one that divides it: {_divisors(dim.size)}"
                )

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that a dim is split over, in the order of the dims."""
        return tuple(axis for axis in self.axes if axis is not None)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The sizes of one slice; the same on every processor."""
        return tuple(
            size if axis is None else size // self.mesh.size(axis)
            for size, axis in zip(self.shape.sizes, self.axes, strict=True)
        )

    def slice_begin(self, processor: int) -> tuple[int, ...]:
        """Returns the begin of a processor's slice in the whole tensor, an index for each dim.

        Raises:
            MeshError: the mesh has no such processor.
        """
        coordinates = self.mesh.coordinates(processor)
        return tuple(
            0 if axis is None else coordinates[axis] * size
            for size, axis in zip(self.slice_shape, self.axes, strict=True)
        )

    def slice_ranges(self, processor: int) -> tuple[slice, ...]:
        """Returns the slice of a processor as Python slices of the whole tensor."""
        return tuple(
            slice(begin, begin + size)
            for begin, size in zip(self.slice_begin(processor), self.slice_shape, strict=True)
        )

    def __str__(self) -> str:
        return ";".join(
            str(dim) if axis is None else f"{dim}/{axis}"
            for dim, axis in zip(self.shape, self.axes, strict=True)
        )
