"""A stage: the lowering it runs under, its weights, and the values that it takes and gives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import Structure
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.check_params import with_article
from pipemesh.layers.feature_extraction import all_layers
from pipemesh.layers.named import NamedLayer, current_lowering, lowering_scope
from pipemesh.layers.named.scope import map_kind
from pipemesh.layers.named.weight_slices import ReplicaCut, replica_cut_scope
from pipemesh.layers.pipeline.weights import replica_of
from pipemesh.lowering import PlacementLowering, Tensor
from pipemesh.lowering.placement import Handover
from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout
from pipemesh.plan.homes import BATCH, cut_rules, inner_mesh, inner_rules, replica_axis
from pipemesh.recurrent import Home
from pipemesh.text import nearest_text

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
    """

    def __init__(
        self, values: tuple[Any, ...], nested_map_fprop: bool, layer: str, what: str
    ) -> None:
        if nested_map_fprop and not (
            len(values) == 1 and isinstance(values[0], py_utils.NestedMap)
        ):
            described = ", ".join(_kind(value) for value in values) or "nothing"
            raise PipelineError(
                f"{layer}: nested_map_fprop means exactly one NestedMap in and out, but {what} are "
                f"{described}; wrap them in one NestedMap, or leave nested_map_fprop unset, which "
                "takes any nesting"
            )
        self._layer = layer
        self.aux_losses: list[bool] = []
        values = handed_over(values, None)
        # In the order of traversal, without the tensors.
        self._noted: list[_Slices] = []
        map_kind(_Slices, lambda s: self._noted.append(_Slices((), s.dims, s.handover)), values)
        self._nesting = Structure(values, what)
        # Equal for equal structures.
        self.key = _key(values)
        self.leaf_names = self._nesting.leaf_names
        self.flatten(values)

    def flatten(self, values: tuple[Any, ...]) -> list[tf.Tensor]:
        """Returns the tensors of values that have this structure."""
        leaves = self._nesting.flatten(handed_over(values, None))
        pairs = zip(leaves, self.leaf_names, strict=True)
        return [self._tensor(leaf, name) for leaf, name in pairs]

    def _tensor(self, leaf: Any, name: str) -> tf.Tensor:
        cause = None
        way_out = next((way for kind, way in _WAYS_OUT.items() if isinstance(leaf, kind)), None)
        if way_out is None:
            try:
                return tf.convert_to_tensor(leaf)
            except (TypeError, ValueError) as error:
                cause, way_out = error, "give tensors"
        kind = with_article(_kind(leaf))
        raise PipelineError(f"{self._layer}: {name} is {kind}; {_WHAT_MAY}: {way_out}") from cause

    def pack_arguments(self, tensors: list[tf.Tensor]) -> tuple[Any, ...]:
        """Packs tensors as positional arguments; slices become tensors of the current lowering."""
        noted = iter(self._noted)
        packed = self._nesting.pack(tensors)
        return map_kind(_Slices, lambda slices: _tensor_of(slices, next(noted)), packed)

    def arrivals(self) -> list[int]:
        """Returns the index of the device in the next stage's replica that takes each tensor."""
        targets = [0] * len(self.leaf_names)
        noted = iter(self._noted)

        def note(numbers: Sequence[int]) -> None:
            handover, places = next(noted).handover, range(len(numbers))
            if handover is not None:
                places = [piece.target for piece in handover.pieces]
            for number, place in zip(numbers, places, strict=True):
                targets[number] = place

        map_kind(_Slices, note, self._nesting.pack([*range(len(targets))]))
        return [*targets, *(0 for _ in self.aux_losses)]

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


def handed_over(values: Any, mesh: Mesh | None) -> Any:
    """Replaces tensors with named dims by their slices, or by pieces for the next stage's mesh.

    `mesh` is None if a replica of the next stage has one device, or is not known here.
    """

    def pieces(value: Tensor | _Slices) -> _Slices:
        if isinstance(value, _Slices):
            return value
        if mesh in (None, value.layout.mesh):
            return _Slices(value.slices, value.shape.names)
        handover = Handover(value.layout, TensorLayout(value.shape, mesh, value.layout.axes))
        # Stages have one device for each slice.
        assert isinstance(value.lowering, PlacementLowering)
        sent = handover.send(value.slices, value.lowering.devices)
        return _Slices(sent, value.shape.names, handover)

    return map_kind((Tensor, _Slices), pieces, values)


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


class StageLowering:
    """The mesh and the rules that split the replicas of a stage of a stack."""

    def __init__(self, mesh: Mesh | None, layout: LayoutRules, place: int = 0) -> None:
        self._mesh, self._layout, self._place = mesh, layout, place
        # The mesh of a replica, or None if only the batch is split.
        self.replica_mesh: Mesh | None = None
        # The way in which weights are cut over the replicas, if they are.
        self.replica_cut: ReplicaCut | None = None
        if mesh is None:
            return
        self.replica_mesh = inner_mesh(mesh, layout, place % mesh.num_stages)
        axis = replica_axis(mesh, layout)
        if axis is not None and cut_rules(layout).rules:
            axes = self.replica_mesh.axes if self.replica_mesh else ()
            rules = LayoutRules((*inner_rules(layout).rules, *cut_rules(layout).rules))
            self.replica_cut = ReplicaCut(Mesh((axis, *axes)), rules)

    def whole_rows(self) -> StageLowering:
        """Returns the same without a rule for `length`, for decoding token by token."""
        # The devices stay: those along an axis that splits nothing else compute the same.
        whole = copy.copy(self)
        whole._layout = LayoutRules(tuple(r for r in self._layout.rules if r[0] != "length"))
        return whole

    @contextlib.contextmanager
    def on(self, devices: Sequence[str], home: Home | None = None) -> Iterator[None]:
        """Enters the scopes that call named layers for a replica, or with `home` make them."""
        mesh = self.replica_mesh
        needed = 1 if mesh is None else mesh.num_devices
        if len(devices) != needed:
            raise PipelineError(
                f"a stage that was made for replicas of {needed} devices "
                f"(mesh '{self._mesh or 'none'}', layout '{self._layout}') is called on replicas "
                f"of {len(devices)}; make it under the mesh and the layout that it is called under"
            )
        cut = self.replica_cut
        if cut is not None and home is not None:
            cut = dataclasses.replace(cut, devices=home.devices)
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(replica_cut_scope(cut))
            if mesh is not None:
                lowering = PlacementLowering(mesh, inner_rules(self._layout), devices)
                scopes.enter_context(lowering_scope(lowering))
            yield

    def check(self, name: str, stages: Sequence[Any]) -> None:
        """Checks that the layout fits the layers of a stack."""
        if self._mesh is None:
            return
        dims = {dim for stage in stages for layer in _named_layers(stage) for dim in layer.dims()}
        try:
            self._layout.check(self._mesh, [BATCH, *sorted(dims)])
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from error
        of_weights = {
            dim
            for stage in stages
            for layer in _named_layers(stage)
            for shape in layer.named_shapes.values()
            for dim in shape.names
        }
        for dim, axis in cut_rules(self._layout).rules:
            if dim not in of_weights:
                raise LayoutError(
                    f"{name}: rule '{dim}:{axis}' names the axis that the batch is split over, so "
                    f"it cuts weights, but no weight has a dim {dim!r}"
                    f"{nearest_text(dim, sorted(of_weights))}"
                )

    def warn_of_idle(self, name: str, stage: Any) -> None:
        """Warns if there are several devices and no layer of the stage uses them."""
        mesh = self.replica_mesh
        if mesh is None or mesh.num_devices == 1:
            return
        if any(layer.dims() for layer in _named_layers(stage)):
            return
        warnings.warn(
            f"{name}: stage {stage.params.name!r} has no layer with named dims, so it runs on the "
            f"first of the {mesh.num_devices} devices of a replica along "
            f"{', '.join(map(repr, mesh.axis_names))}, and the others idle",
            stacklevel=4,
        )


def _named_layers(stage: Any) -> list[NamedLayer]:
    return [layer for layer in all_layers(stage) if isinstance(layer, NamedLayer)]


class StageWeights:
    """The weights of a stage for the executor: each tensor on one device of its home."""

    def __init__(self, cell: Any, theta: Any, home: Home) -> None:
        self._theta = theta
        # One tensor for each device of a replica that needs a weight.
        self.tensors: list[Any] = []
        # The index of each tensor's device in the home.
        self.places: list[int] = []
        # The numbers of copies, with the number of the original.
        self.copies: dict[int, int] = {}
        # The numbers of tensors that replicas fetch, since they are cut over them.
        fetched: set[int] = set()
        self._counts: list[int] = []
        for weight, held in zip(theta.Flatten(), _held(cell, theta), strict=True):
            variable, holders, replica = held
            self._counts.append(len(holders))
            if replica is None:
                replica = replica_of(variable, home)
            else:
                fetched.add(len(self.tensors))
            first = replica * home.group
            for number, holder in enumerate(holders):
                if number:
                    self.copies[len(self.tensors)] = len(self.tensors) - number
                with tf.device(home.devices[first + holder]):
                    self.tensors.append(tf.identity(weight) if number else weight)
                self.places.append(first + holder)
        self.fetched = frozenset(fetched)

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Repeats each weight's value for each of its tensors."""
        pairs = zip(values, self._counts, strict=True)
        return [value for value, count in pairs for _ in range(count)]

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Packs tensors as the theta of the stage; several copies of a weight become a tuple."""
        rest = iter(tensors)
        packed = []
        for count in self._counts:
            copies = tuple(next(rest) for _ in range(count))
            packed.append(copies if count > 1 else copies[0])
        return self._theta.Pack(packed)


def _held(layer: Any, theta: Any) -> Iterator[tuple[Any, tuple[int, ...], int | None]]:
    """Yields the variable, the holders and the replica of each weight, as `theta.Flatten()` does.

    Holders are the devices of a replica that need the weight; plain layers compute on the first
    one. The replica is None unless the weight is cut over replicas.
    """
    if isinstance(layer, list | tuple):
        for part, weights in zip(layer, theta, strict=True):
            yield from _held(part, weights)
        return
    parts = layer.weight_parts() if isinstance(layer, NamedLayer) else {}
    variables = layer.vars
    for name in sorted(theta):
        if name in layer.children:
            yield from _held(layer.children[name], theta[name])
        elif name in parts:
            yield variables.get(name), parts[name].holders, parts[name].replica
        else:
            yield variables.get(name), (0,), None
