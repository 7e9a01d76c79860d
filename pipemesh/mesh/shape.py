"""Shapes of tensors: named dims in order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from pipemesh.errors import ShapeError
from pipemesh.mesh.checks import is_name, text_of, whole_number
from pipemesh.text import nearest_text

_DIM = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*:\s*([0-9]+)\s*")


@dataclasses.dataclass(frozen=True)
class Dim:
    """A named dim of a tensor with its size over all devices.

    Attributes:
        name: letters, digits and underscores, not starting with a digit.
        size: at least 0.

    Raises:
        ShapeError: the name or the size is invalid.

    Example:
        >>> Dim("heads", 8), str(Dim.from_text("heads:8"))
        (Dim(name='heads', size=8), 'heads:8')
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ShapeError(
                f"{self.name!r} is no name of a dim; use letters, digits and underscores"
            )
        size = whole_number(self.size)
        if size is None or size < 0:
            raise ShapeError(
                f"dim {self.name!r} has size {self.size!r}; sizes are whole numbers from 0 on"
            )
        object.__setattr__(self, "size", size)

    @classmethod
    def from_text(cls, text: str) -> Dim:
        """Returns the dim of a text `name:size`.

        Raises:
            ShapeError: `text` has another form.
        """
        match = _DIM.fullmatch(text_of(text, ShapeError, "heads:8"))
        if match is None:
            raise ShapeError(f"{text!r} is not name:size; write for example 'heads:8'")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dims in order, no name twice.

    Two shapes are equal if they have the same dims in the same order. The operators `|`, `&` and
    `-` are those of sets; they keep the order of the left operand, then that of the right one.

    Attributes:
        dims: the dims.

    Raises:
        ShapeError: a name occurs twice.

    Example:
        >>> images = Shape.from_text("batch:100;rows:28;cols:28")
        >>> images.sizes, images["rows"].size, "cols" in images
        ((100, 28, 28), 28, True)
        >>> str(images | Shape.from_text("batch:100;classes:10"))
        'batch:100;rows:28;cols:28;classes:10'
        >>> str(images & Shape.from_text("cols:28;batch:100")), str(images - images)
        ('batch:100;cols:28', '')
    """

    dims: tuple[Dim, ...] = ()

    def __post_init__(self) -> None:
        dims: Any = self.dims
        if not isinstance(dims, list | tuple) or not all(
            isinstance(dim, Dim) for dim in cast(Any, dims)
        ):
            raise ShapeError(
                f"{dims!r} are no dims; write Shape.from_text('batch:4;io:3'), or give a tuple of "
                "Dims"
            )
        object.__setattr__(self, "dims", tuple(self.dims))
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise ShapeError(
                    f"dim {name!r} occurs twice in {self}; rename one of the two: the dims of a "
                    "tensor have different names"
                )

    @classmethod
    def from_text(cls, text: str) -> Shape:
        """Returns the shape of a text: `name:size` pairs joined by semicolons; empty for a scalar.

        Raises:
            ShapeError: `text` has another form.
        """
        if not text_of(text, ShapeError, "batch:4;io:3").strip():
            return cls()
        return cls(tuple(Dim.from_text(part) for part in text.split(";")))

    @classmethod
    def of(cls, **sizes: int) -> Shape:
        """Returns the shape of these names and sizes, in order."""
        return cls(tuple(Dim(name, size) for name, size in sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dims, in order."""
        return tuple(dim.name for dim in self.dims)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the dims, in order."""
        return tuple(dim.size for dim in self.dims)

    @property
    def size(self) -> int:
        """The number of elements, the product of the sizes."""
        return math.prod(self.sizes)

    def __getitem__(self, name: str) -> Dim:
        return self.dims[self.index(name)]

    def index(self, dim: Dim | str) -> int:
        """Returns the position of a dim, given itself or its name.

        Raises:
            ShapeError: no dim has this name, or it has another size.
        """
        name = dim.name if isinstance(dim, Dim) else dim
        if name not in self.names:
            raise ShapeError(
                f"no dim is called {name!r} in the shape '{self}'"
                f"{nearest_text(str(name), self.names)}"
            )
        position = self.names.index(name)
        if isinstance(dim, Dim) and self.dims[position] != dim:
            raise ShapeError(
                f"dim {name!r} has size {dim.size}, but in the shape '{self}' it has size "
                f"{self.dims[position].size}; use one size"
            )
        return position

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an error that names the attributes of a shape, which TensorFlow's lack."""
            raise AttributeError(
                f"a Shape has no {name!r}; shape.sizes and shape.names are tuples, "
                "shape['batch'].size is the size of a dim, len(shape) the number of dims, and "
                "shape.size the number of elements"
            )

    def __contains__(self, dim: Dim | str) -> bool:
        return dim in self.dims if isinstance(dim, Dim) else dim in self.names

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    def __len__(self) -> int:
        return len(self.dims)

    def _check_sizes(self, other: Shape) -> None:
        if not isinstance(other, Shape):  # type: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(f"{other!r} is not a Shape; write Shape.from_text('batch:4;io:3')")
        for dim in other:
            if dim.name in self.names and self[dim.name] != dim:
                raise ShapeError(
                    f"dim {dim.name!r} has size {self[dim.name].size} in '{self}' and {dim.size} "
                    f"in '{other}'; one name stands for one size, so rename one of the two"
                )

    def __or__(self, other: Shape) -> Shape:
        self._check_sizes(other)
        return Shape(self.dims + tuple(dim for dim in other if dim not in self.dims))

    def __and__(self, other: Shape) -> Shape:
        self._check_sizes(other)
        return Shape(tuple(dim for dim in self if dim in other.dims))

    def __sub__(self, other: Shape) -> Shape:
        self._check_sizes(other)
        return Shape(tuple(dim for dim in self if dim not in other.dims))

    def __le__(self, other: Shape) -> bool:
        self._check_sizes(other)
        return all(dim in other.dims for dim in self)

    def without(self, *names: str) -> Shape:
        """Returns the shape without some dims.

        Raises:
            ShapeError: a name is unknown.
        """
        for name in names:
            self.index(name)
        return Shape(tuple(dim for dim in self if dim.name not in names))

    def select(self, *names: str) -> Shape:
        """Returns the named dims, in the order of the names.

        Raises:
            ShapeError: a name is unknown or occurs twice.
        """
        return Shape(tuple(self[name] for name in names))

    def replace(self, name: str, *dims: Dim) -> Shape:
        """Returns the shape with other dims, or none, in the place of one.

        Raises:
            ShapeError: the name is unknown, or a name occurs twice in the result.
        """
        at = self.index(name)
        return Shape(self.dims[:at] + dims + self.dims[at + 1 :])

    def __str__(self) -> str:
        return ";".join(map(str, self.dims))
