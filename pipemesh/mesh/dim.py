"""A dim: one named side of a tensor."""

from __future__ import annotations

import dataclasses
import re

from pipemesh.errors import ShapeError
from pipemesh.mesh.checks import is_name, text_of, whole_number

_DIM = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*:\s*([0-9]+)\s*")


@dataclasses.dataclass(frozen=True)
class Dim:
    """A named dim of a tensor with its size over all devices.

    Attributes:
        name: letters, digits and underscores, not starting with a digit.
        size: at least 0.

    Raises:
        ShapeError: the name or the size is none.

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
        """Parses `name:size`.

        Raises:
            ShapeError: `text` has another form.
        """
        match = _DIM.fullmatch(text_of(text, ShapeError, "heads:8"))
        if match is None:
            raise ShapeError(f"{text!r} is not name:size; write for example 'heads:8'")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"
