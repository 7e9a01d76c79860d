"""What goes from stage to stage, as flat lists of tensors and back."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError


class Structure:
    """Where tensors and where None stand in what goes from stage to stage."""

    def __init__(self, present: list[bool], nested_map: Any) -> None:
        self._present = present
        self._map = nested_map

    @classmethod
    def of(cls, values: tuple[Any, ...], nested_map_fprop: bool, name: str) -> Structure:
        """That of some values.

        Args:
            values: tensors and None; with `nested_map_fprop` exactly one NestedMap of such.
            nested_map_fprop: whether they are one NestedMap.
            name: of the layer, for errors.

        Raises:
            PipelineError: there is not exactly one NestedMap, though there should be.
        """
        nested_map = None
        if nested_map_fprop:
            if len(values) != 1 or not isinstance(values[0], py_utils.NestedMap):
                raise PipelineError(
                    f"{name}: nested_map_fprop means exactly one NestedMap in and out; got "
                    f"{', '.join(type(v).__name__ for v in values)}"
                )
            nested_map = values[0].Transform(lambda _: 0)
            values = tuple(values[0].Flatten())
        return cls([value is not None for value in values], nested_map)

    def key(self) -> Any:
        """Equal for equal structures."""
        names = None if self._map is None else tuple(k for k, _ in self._map.FlattenItems())
        return tuple(self._present), names

    def flatten(self, values: tuple[Any, ...]) -> list[tf.Tensor]:
        """The tensors of values that have this structure."""
        flat = values if self._map is None else values[0].Flatten()
        return [tf.convert_to_tensor(value) for value in flat if value is not None]

    def pack_arguments(self, tensors: list[tf.Tensor]) -> tuple[Any, ...]:
        """The values, as positional arguments."""
        values = iter(tensors)
        flat = [next(values) if present else None for present in self._present]
        return tuple(flat) if self._map is None else (self._map.Pack(flat),)

    def pack(self, tensors: list[tf.Tensor]) -> Any:
        """One value is returned bare, several as a tuple."""
        arguments = self.pack_arguments(tensors)
        return arguments[0] if len(arguments) == 1 else arguments
