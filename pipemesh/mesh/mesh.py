"""The mesh: named axes with sizes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from pipemesh.errors import MeshError
from pipemesh.mesh.checks import is_name, pairs_of, text_of, whole_number
from pipemesh.text import nearest_text

LAYERS_AXIS = "layers"
_AXIS = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*:\s*([0-9]+)\s*")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """An array of processors with named axes.

    Processors are numbered row by row: the last axis varies fastest. The axis `layers` indexes
    the stages of a pipeline; each stage owns the sub-mesh of the remaining axes.

    Attributes:
        axes: pairs of axis name and size, in order; without axes it is a single processor.

    Raises:
        MeshError: an axis is named twice or has a size below 1.

    Example:
        >>> mesh = Mesh.from_text("layers:4;data:2")
        >>> mesh.size("layers"), mesh.size("model"), str(mesh)
        (4, 1, 'layers:4;data:2')
        >>> mesh.coordinates(3), mesh.stage_mesh, mesh.stage_processors(1)
        ({'layers': 1, 'data': 1}, Mesh(axes=(('data', 2),)), (2, 3))
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if pairs_of(self.axes) is None:
            raise MeshError(
                f"{self.axes!r} are no axes of a mesh; write Mesh.from_text('layers:2;data:2'), or "
                "give pairs of axis and size"
            )
        names = self.axis_names
        axes: list[tuple[str, int]] = []
        for name, given in self.axes:
            if not is_name(name):
                raise MeshError(
                    f"{name!r} is no name of an axis; use letters, digits and underscores"
                )
            if names.count(name) > 1:
                raise MeshError(f"axis {name!r} is named twice; merge its sizes into one axis")
            size = whole_number(given)
            if size is None or size < 1:
                raise MeshError(
                    f"axis {name!r} has size {given!r}; sizes are whole numbers from 1 on"
                )
            axes.append((name, size))
        object.__setattr__(self, "axes", tuple(axes))

    @classmethod
    def from_text(cls, text: str) -> Mesh:
        """Parses `name:size` pairs that are joined by semicolons.

        Raises:
            MeshError: `text` has another form.
        """
        axes: list[tuple[str, int]] = []
        for part in text_of(text, MeshError, "layers:4;data:2").split(";"):
            match = _AXIS.fullmatch(part)
            if match is None:
                raise MeshError(
                    f"{part!r} in mesh shape {text!r} is not name:size; "
                    "write for example 'layers:2' or 'layers:4;data:2'"
                )
            axes.append((match[1], int(match[2])))
        return cls(tuple(axes))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def num_devices(self) -> int:
        """The product of the sizes."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The size of `axis`; an axis that the mesh does not name has size 1."""
        return dict(self.axes).get(axis, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, in order."""
        return tuple(size for _, size in self.axes)

    def check_axis(self, axis: str) -> None:
        """Checks that the mesh has an axis.

        Raises:
            MeshError: it has not.
        """
        if axis not in self.axis_names:
            raise MeshError(
                f"mesh '{self}' has no axis {axis!r}{nearest_text(axis, self.axis_names)}"
            )

    def stride(self, axis: str) -> int:
        """How far apart in number two neighbours along an axis are.

        Raises:
            MeshError: there is no such axis.
        """
        self.check_axis(axis)
        return math.prod(self.shape[self.axis_names.index(axis) + 1 :])

    def coordinates(self, processor: int) -> dict[str, int]:
        """The coordinate of a processor along each axis.

        Raises:
            MeshError: there is no such processor.
        """
        if not 0 <= processor < self.num_devices:
            raise MeshError(
                f"mesh '{self}' has no processor {processor}; it has 0 to {self.num_devices - 1}"
            )
        return {name: processor // self.stride(name) % size for name, size in self.axes}

    def processor(self, coordinates: Mapping[str, int]) -> int:
        """The number of the processor at some coordinates; axes that are left out are at 0.

        Raises:
            MeshError: an axis is unknown or a coordinate outside of it.

        Example:
            >>> Mesh.from_text("rows:2;cols:4").processor({"rows": 1, "cols": 2})
            6
        """
        for axis, at in coordinates.items():
            self.check_axis(axis)
            if not 0 <= at < self.size(axis):
                raise MeshError(
                    f"axis {axis!r} of mesh '{self}' has no coordinate {at}; it has 0 to "
                    f"{self.size(axis) - 1}"
                )
        return sum(at * self.stride(axis) for axis, at in coordinates.items())

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The processors that differ along some axes only, group by group, ascending.

        Args:
            axes: the axes along which members of a group differ.

        Raises:
            MeshError: an axis is unknown.

        Example:
            >>> Mesh.from_text("data:2;model:2").groups(["data"])
            ((0, 2), (1, 3))
        """
        chosen = set(axes)
        for axis in chosen:
            self.check_axis(axis)
        groups: dict[tuple[int, ...], list[int]] = {}
        for processor in range(self.num_devices):
            at = self.coordinates(processor)
            rest = tuple(at[name] for name in self.axis_names if name not in chosen)
            groups.setdefault(rest, []).append(processor)
        return tuple(map(tuple, groups.values()))

    def without(self, axis: str) -> Mesh:
        """The mesh of the other axes."""
        return Mesh(tuple(pair for pair in self.axes if pair[0] != axis))

    @property
    def num_stages(self) -> int:
        """The size of the axis `layers`."""
        return self.size(LAYERS_AXIS)

    @property
    def stage_mesh(self) -> Mesh:
        """The sub-mesh that each stage owns."""
        return self.without(LAYERS_AXIS)

    def stage_processors(self, stage: int) -> tuple[int, ...]:
        """The processors of one stage, in the order of its sub-mesh.

        Raises:
            MeshError: there is no such stage.
        """
        if not 0 <= stage < self.num_stages:
            raise MeshError(
                f"mesh '{self}' has no stage {stage}; it has 0 to {self.num_stages - 1}"
            )
        return self.groups(self.stage_mesh.axis_names)[stage]

    def __str__(self) -> str:
        return ";".join(f"{name}:{size}" for name, size in self.axes)
