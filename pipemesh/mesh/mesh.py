"""The mesh: named axes with sizes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, cast

from pipemesh.errors import LayoutError, MeshError
from pipemesh.mesh.checks import is_name, pairs_of, text_of, whole_number
from pipemesh.text import nearest_text

LAYERS_AXIS = "layers"
_AXIS = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*:\s*([0-9]+(?:\s*,\s*[0-9]+)*)\s*")

# The size of an axis, or one size for each place along the axis `layers`.
Size = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mesh:
    """An array of processors with named axes.

    Processors are numbered row by row: the last axis varies fastest. The axis `layers` indexes
    the stages of a pipeline; each stage owns the sub-mesh of the remaining axes. Their sizes may
    differ from place to place along `layers`; processors are then numbered place by place.

    Attributes:
        axes: pairs of axis name and size, in order; empty for a single processor. A size may be a
            tuple with one for each place along `layers`.

    Raises:
        MeshError: an axis is named twice, has a size below 1, or has several sizes, but not one for
            each place along `layers`.

    Example:
        >>> mesh = Mesh.from_text("layers:4;data:2")
        >>> mesh.size("layers"), mesh.size("model"), str(mesh)
        (4, 1, 'layers:4;data:2')
        >>> mesh.coordinates(3), mesh.stage_mesh, mesh.stage_processors(1)
        ({'layers': 1, 'data': 1}, Mesh(axes=(('data', 2),)), (2, 3))
        >>> mesh = Mesh.from_text("layers:2;model:4,1")
        >>> mesh.num_devices, mesh.place_mesh(1), mesh.stage_processors(1)
        (5, Mesh(axes=(('model', 1),)), (4,))
    """

    axes: tuple[tuple[str, Size], ...]

    def __post_init__(self) -> None:
        if pairs_of(self.axes) is None:
            raise MeshError(
                f"the axes of a mesh are {self.axes!r}, but must be pairs of name and size; write "
                "Mesh.from_text('layers:2;data:2')"
            )
        names = self.axis_names
        axes: list[tuple[str, Size]] = []
        for name, size in self.axes:
            if not is_name(name):
                raise MeshError(
                    f"{name!r} is no name of an axis; use letters, digits and underscores"
                )
            if names.count(name) > 1:
                raise MeshError(f"axis {name!r} is named twice; merge its sizes into one axis")
            axes.append((name, _size_of(name, size)))
        object.__setattr__(self, "axes", tuple(axes))
        self._check_places()
        # Several that are equal are one.
        one = [(name, size[0] if _is_constant(size) else size) for name, size in axes]
        object.__setattr__(self, "axes", tuple(one))

    def _check_places(self) -> None:
        """Checks that an axis has one size, or one for each place along `layers`."""
        places = dict(self.axes).get(LAYERS_AXIS, 1)
        for name, size in self.axes:
            if isinstance(size, int):
                continue
            if name == LAYERS_AXIS:
                raise MeshError(f"axis 'layers' of mesh '{self}' has several sizes; give it one")
            if len(size) != places:
                raise MeshError(
                    f"axis {name!r} of mesh '{self}' has {len(size)} sizes, but the number of "
                    f"places along the axis 'layers' is {places}; give one size, or one for each "
                    "place, as 'layers:2;model:4,1'"
                )

    @classmethod
    def from_text(cls, text: str) -> Mesh:
        """Returns the mesh of a text: `name:size` pairs joined by semicolons.

        An axis may have a size for each place along `layers`, with commas: `layers:2;model:4,1`.

        Raises:
            MeshError: `text` has another form.
        """
        axes: list[tuple[str, Size]] = []
        for part in text_of(text, MeshError, "layers:4;data:2").split(";"):
            match = _AXIS.fullmatch(part)
            if match is None:
                raise MeshError(
                    f"{part!r} in mesh shape {text!r} is not name:size; "
                    "write for example 'layers:2' or 'layers:4;data:2'"
                )
            axes.append((match[1], tuple(map(int, match[2].split(",")))))
        return cls(tuple(axes))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def num_devices(self) -> int:
        """The number of processors."""
        if self.is_even:
            return math.prod(self.shape)
        return sum(self.place_mesh(place).num_devices for place in range(self.num_stages))

    @property
    def is_even(self) -> bool:
        """True if each axis has the same size at all places along `layers`."""
        return all(isinstance(size, int) for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Returns the size of `axis`; an axis that the mesh does not name has size 1.

        Raises:
            MeshError: it has a size for each place along `layers`; see `place_mesh`.
        """
        size = dict(self.axes).get(axis, 1)
        if not isinstance(size, int):
            raise MeshError(
                f"axis {axis!r} of mesh '{self}' has several sizes, one for each place along "
                "'layers'; only pipelines with lowering=placement support that, so give it one size"
            )
        return size

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, in order.

        Raises:
            MeshError: as `size`.
        """
        return tuple(self.size(name) for name, _ in self.axes)

    def check_axis(self, axis: str) -> None:
        """Checks that the mesh has an axis.

        Raises:
            MeshError: the axis is unknown.
        """
        if axis not in self.axis_names:
            raise MeshError(
                f"mesh '{self}' has no axis {axis!r}{nearest_text(axis, self.axis_names)}"
            )

    def stride(self, axis: str) -> int:
        """Returns the difference in number of two neighbours along an axis.

        Raises:
            MeshError: there is no such axis.
        """
        self.check_axis(axis)
        return math.prod(self.shape[self.axis_names.index(axis) + 1 :])

    def coordinates(self, processor: int) -> dict[str, int]:
        """Returns the coordinate of a processor along each axis.

        Raises:
            MeshError: there is no such processor.
        """
        if not 0 <= processor < self.num_devices:
            raise MeshError(
                f"mesh '{self}' has no processor {processor}; it has 0 to {self.num_devices - 1}"
            )
        if not self.is_even:
            place, inner = self._place_of(processor)
            at = self.place_mesh(place).coordinates(inner)
            return {name: at.get(name, place) for name in self.axis_names}
        return {name: processor // self.stride(name) % self.size(name) for name in self.axis_names}

    def processor(self, coordinates: Mapping[str, int]) -> int:
        """Returns the number of the processor at some coordinates, 0 along axes that are left out.

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
        """Returns groups of processors that differ only along `axes`, in ascending order.

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

    def without(self, *axes: str) -> Mesh:
        """Returns the mesh of the other axes."""
        return Mesh(tuple(pair for pair in self.axes if pair[0] not in axes))

    @property
    def num_stages(self) -> int:
        """The size of the axis `layers`."""
        return self.size(LAYERS_AXIS)

    @property
    def stage_mesh(self) -> Mesh:
        """The sub-mesh that each stage owns.

        Raises:
            MeshError: stages own different sub-meshes; see `place_mesh`.
        """
        self.shape  # noqa: B018
        return self.without(LAYERS_AXIS)

    def place_mesh(self, place: int) -> Mesh:
        """Returns the sub-mesh of the stages at a place along `layers`.

        Raises:
            MeshError: there is no such place.
        """
        self._check_stage(place)
        return Mesh(
            tuple(
                (name, size if isinstance(size, int) else size[place])
                for name, size in self.axes
                if name != LAYERS_AXIS
            )
        )

    def _place_of(self, processor: int) -> tuple[int, int]:
        """Returns the place of a processor along `layers` and its number in the sub-mesh there."""
        for place in range(self.num_stages):
            size = self.place_mesh(place).num_devices
            if processor < size:
                return place, processor
            processor -= size
        raise AssertionError

    def stage_processors(self, stage: int) -> tuple[int, ...]:
        """Returns the processors of one stage, in the order of its sub-mesh.

        Raises:
            MeshError: there is no such stage.
        """
        self._check_stage(stage)
        return self.groups(name for name in self.axis_names if name != LAYERS_AXIS)[stage]

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.num_stages:
            raise MeshError(
                f"mesh '{self}' has no stage {stage}; it has 0 to {self.num_stages - 1}"
            )

    def __str__(self) -> str:
        return ";".join(
            f"{name}:{size if isinstance(size, int) else ','.join(map(str, size))}"
            for name, size in self.axes
        )


def _size_of(name: str, value: object) -> Size:
    """Returns the size or the sizes of an axis."""
    values: list[Any] = list(cast(Any, value)) if isinstance(value, list | tuple) else [value]
    sizes = [size for one in values if (size := whole_number(one)) is not None and size > 0]
    if not values or len(sizes) < len(values):
        text = ",".join(map(repr, values)) or "()"
        raise MeshError(f"axis {name!r} has size {text}; sizes are whole numbers from 1 on")
    return sizes[0] if len(sizes) == 1 else tuple(sizes)


def _is_constant(size: Size) -> TypeGuard[tuple[int, ...]]:
    return not isinstance(size, int) and len(set(size)) == 1


def check_mesh(mesh: Any) -> None:
    """Raises a LayoutError for anything but a mesh."""
    if not isinstance(mesh, Mesh):
        raise LayoutError(f"the mesh is {mesh!r}; write Mesh.from_text('data:2;model:2')")
