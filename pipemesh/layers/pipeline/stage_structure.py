"""Conversion of the values between stages to flat lists of tensors and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import with_article
from pipemesh.layers.named import current_lowering
from pipemesh.layers.named.values import map_kind
from pipemesh.lowering import PlacementLowering, Tensor
from pipemesh.lowering.placement import Handover
from pipemesh.mesh import Mesh, Shape, TensorLayout

_WHAT_MAY = "what goes in and out of a stage are dense tensors and None, nested in NestedMaps, \
dicts, lists and tuples"
_WAYS_OUT = {
    tf.SparseTensor: "convert it with tf.sparse.to_dense, or give its parts as dense tensors",
    tf.RaggedTensor: "pad it with its method to_tensor",
    tf.IndexedSlices: "convert it with tf.convert_to_tensor",
    str: "give a tensor, or make it one of the layer's params",
    bytes: "give a tensor, or make it one of the layer's params",
}


class StageStructure:
    """The nesting of the values between stages, and the positions of None.

    A tensor with named dims travels as slices, each to the device at the same position. After
    `handed_over` it travels as pieces that make up the slices of the next stage.

    Args:
        values: tensors, with named dims or plain ones, and None, each alone or nested.
        nested_map_fprop: whether they are exactly one NestedMap.
        layer: the owner of the values, for errors.
        what: their name in errors, `args` or `outputs`.

    Attributes:
        leaf_names: a name for each tensor, as `args.0.ids`.
        aux_losses: whether each loss that follows these tensors is a scalar.

    Raises:
        PipelineError: `nested_map_fprop` is set and there is not exactly one NestedMap, or a leaf
            is neither a tensor nor None.
    """

    def __init__(
        self, values: tuple[Any, ...], nested_map_fprop: bool, layer: str, what: str
    ) -> None:
        if nested_map_fprop and not (
            len(values) == 1 and isinstance(values[0], py_utils.NestedMap)
        ):
            given = ", ".join(_kind(value) for value in values) or "nothing"
            raise PipelineError(
                f"{layer}: nested_map_fprop means exactly one NestedMap in and out, but {what} are "
                f"{given}; wrap them in one NestedMap, or leave nested_map_fprop unset, which "
                "takes any nesting"
            )
        self._layer = layer
        self.aux_losses: list[bool] = []
        values = _sliced(values)
        # In the order of traversal, without the tensors.
        self._noted: list[_Slices] = []
        map_kind(_Slices, lambda s: self._noted.append(s.without_tensors()), values)
        self._nesting = Structure(values, what)
        self._key = _key(values)
        self.leaf_names = self._nesting.leaf_names
        self.flatten(values)

    def key(self) -> Any:
        """Returns a key that is equal for equal structures."""
        return self._key

    def flatten(self, values: tuple[Any, ...]) -> list[tf.Tensor]:
        """Returns the tensors of values that have this structure."""
        leaves = self._nesting.flatten(_sliced(values))
        pairs = zip(leaves, self.leaf_names, strict=True)
        return [self._tensor(leaf, name) for leaf, name in pairs]

    def _tensor(self, leaf: Any, name: str) -> tf.Tensor:
        way_out = next((way for kind, way in _WAYS_OUT.items() if isinstance(leaf, kind)), None)
        if way_out is None:
            try:
                return tf.convert_to_tensor(leaf)
            except (TypeError, ValueError) as error:
                raise self._no_tensor(leaf, name, "give tensors") from error
        raise self._no_tensor(leaf, name, way_out)

    def _no_tensor(self, leaf: Any, name: str, way_out: str) -> PipelineError:
        kind = with_article(_kind(leaf))
        return PipelineError(f"{self._layer}: {name} is {kind}; {_WHAT_MAY}: {way_out}")

    def pack_arguments(self, tensors: list[tf.Tensor]) -> tuple[Any, ...]:
        """Packs tensors as positional arguments; slices become tensors of the current lowering."""
        noted = iter(self._noted)
        packed = self._nesting.pack(tensors)
        return map_kind(_Slices, lambda found: _tensor_of(found, next(noted)), packed)

    def arrivals(self) -> list[int]:
        """Returns the index of the device in the next stage's replica that takes each tensor."""
        found = [0] * len(self.leaf_names)
        noted = iter(self._noted)

        def note(numbers: Sequence[int]) -> None:
            handover, places = next(noted).handover, range(len(numbers))
            if handover is not None:
                places = [piece.target for piece in handover.pieces]
            for number, place in zip(numbers, places, strict=True):
                found[number] = place

        map_kind(_Slices, note, self._nesting.pack([*range(len(found))]))
        return [*found, *(0 for _ in self.aux_losses)]

    def pack(self, tensors: list[tf.Tensor]) -> Any:
        """Packs tensors as one bare value, or as a tuple of several."""
        arguments = self.pack_arguments(tensors)
        return arguments[0] if len(arguments) == 1 else arguments


class _Slices(list[Any]):
    """The slices of a tensor with named dims, by processor, or the pieces of a handover."""

    def __init__(
        self,
        tensors: Iterable[Any],
        dims: tuple[str, ...] = (),
        handover: Handover | None = None,
    ) -> None:
        super().__init__(tensors)
        self.dims = dims
        self.handover = handover

    def without_tensors(self) -> _Slices:
        """Returns the dims and the handover alone."""
        return _Slices((), self.dims, self.handover)


def _sliced(values: Any) -> Any:
    """Replaces tensors with named dims by their slices."""

    def slices(value: Tensor | _Slices) -> _Slices:
        return value if isinstance(value, _Slices) else _slices_of(value)

    return map_kind((Tensor, _Slices), slices, values)


def _slices_of(tensor: Tensor) -> _Slices:
    return _Slices(tensor.slices, tensor.shape.names)


def handed_over(values: Any, mesh: Mesh | None) -> Any:
    """Replaces tensors with named dims by what travels to the next stage.

    These are their slices, or pieces of them if the next stage's replicas are another mesh. `mesh`
    is None if a replica of the next stage has one device.

    Raises:
        LayoutError: a dim does not divide on the next mesh.
    """

    def pieces(tensor: Tensor) -> _Slices:
        if mesh in (None, tensor.layout.mesh):
            return _slices_of(tensor)
        handover = Handover(tensor.layout, TensorLayout(tensor.shape, mesh, tensor.layout.axes))
        # Stages have one device for each slice.
        assert isinstance(tensor.lowering, PlacementLowering)
        sent = handover.send(tensor.slices, tensor.lowering.devices)
        return _Slices(sent, tensor.shape.names, handover)

    return map_kind(Tensor, pieces, values)


def _tensor_of(tensors: Sequence[tf.Tensor], noted: _Slices) -> Tensor:
    """Joins slices to a tensor of the current lowering."""
    lowering, dims = current_lowering(), noted.dims
    slices = tuple(tensors)
    if noted.handover is not None:
        assert isinstance(lowering, PlacementLowering)
        slices = noted.handover.receive(slices, lowering.devices)
    axes = [lowering.rules.axis(dim) for dim in dims]
    sizes = [
        size * (1 if axis is None else lowering.mesh.size(axis))
        for size, axis in zip(static_sizes(slices[0]), axes, strict=True)
    ]
    return Tensor(lowering, slices, Shape.of(**dict(zip(dims, sizes, strict=True))))


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, tf.Tensor) else type(value).__name__


def _key(value: Any) -> Any:
    if isinstance(value, Mapping):
        return type(value), tuple((key, _key(value[key])) for key in sorted(value))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_key, value))
    return value is not None
