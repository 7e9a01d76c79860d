"""A stage: the lowering it runs under, its weights, and the values that it takes and gives."""

from __future__ import annotations

import contextlib
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
from pipemesh.layers.named import NamedLayer, current_lowering, lowering_scope
from pipemesh.layers.named.scope import map_kind
from pipemesh.layers.named.weight_slices import ReplicaCut, replica_cut_scope
from pipemesh.layers.pipeline.spread_weights import replica_of
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


class StageLowering:
    """The mesh and the rules that split the replicas of a stage of a stack.

    Args:
        mesh: the mesh of the stack; None if there is none.
        layout: its rules.
        place: the position of the stage along the axis `layers`, which wraps around after the last.
    """

    def __init__(self, mesh: Mesh | None, layout: LayoutRules, place: int = 0) -> None:
        self._layout, self._place = layout, place
        self._mesh = mesh
        self._inner = None if mesh is None else inner_mesh(mesh, layout, place % mesh.num_stages)
        axis = None if mesh is None else replica_axis(mesh, layout)
        self._cut: ReplicaCut | None = None
        if axis is not None and cut_rules(layout).rules:
            axes = self._inner.axes if self._inner else ()
            rules = LayoutRules((*inner_rules(layout).rules, *cut_rules(layout).rules))
            self._cut = ReplicaCut(Mesh((axis, *axes)), rules)

    @property
    def replica_mesh(self) -> Mesh | None:
        """Returns the mesh of a replica, or None if only the batch is split."""
        return self._inner

    @property
    def splits(self) -> bool:
        """Returns whether more than the batch is split."""
        return self._inner is not None

    @property
    def cuts_weights(self) -> bool:
        """Returns whether weights are cut over the replicas."""
        return self._cut is not None

    def whole_rows(self) -> StageLowering:
        """Returns the same without a rule for `length`, for decoding token by token."""
        rules = tuple(rule for rule in self._layout.rules if rule[0] != "length")
        return StageLowering(self._mesh, LayoutRules(rules), self._place)

    @contextlib.contextmanager
    def on(self, devices: Sequence[str], home: Home | None = None) -> Iterator[None]:
        """Enters the scopes that make or call named layers for a replica with these devices.

        `home` has the devices of all replicas; pass it when layers are made.

        Raises:
            PipelineError: the stack was made for another number of devices.
        """
        wanted = 1 if self._inner is None else self._inner.num_devices
        if len(devices) != wanted:
            raise PipelineError(
                f"a stage that was made for replicas of {wanted} devices "
                f"(mesh '{self._mesh or 'none'}', layout '{self._layout}') is called on replicas "
                f"of {len(devices)}; make it under the mesh and the layout that it is called under"
            )
        with contextlib.ExitStack() as scopes:
            cut = self._cut
            if cut is not None and home is not None:
                cut = dataclasses.replace(cut, devices=home.devices)
            scopes.enter_context(replica_cut_scope(cut))
            if self._inner is not None:
                lowering = PlacementLowering(self._inner, inner_rules(self._layout), devices)
                scopes.enter_context(lowering_scope(lowering))
            yield

    def check(self, name: str, stages: Sequence[Any]) -> None:
        """Checks that the layout fits the layers of a stack.

        Raises:
            LayoutError: a rule names a dim that no layer has, or a rule for weights only names a
                dim that no weight has.
        """
        if self._mesh is None:
            return
        dims = set().union(*map(_dims, stages))
        try:
            self._layout.check(self._mesh, [BATCH, *sorted(dims)])
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from error
        of_weights = set().union(*map(_weight_dims, stages))
        for dim, axis in cut_rules(self._layout).rules:
            if dim not in of_weights:
                raise LayoutError(
                    f"{name}: rule '{dim}:{axis}' names the axis that the batch is split over, so "
                    f"it cuts weights, but no weight has a dim {dim!r}"
                    f"{nearest_text(dim, sorted(of_weights))}"
                )

    def warn_of_idle(self, name: str, stage: Any) -> None:
        """Warns if there are several devices and no layer of the stage uses them."""
        if self._inner is None or self._inner.num_devices == 1 or _dims(stage):
            return
        warnings.warn(
            f"{name}: stage {stage.params.name!r} has no layer with named dims, so it runs on the "
            f"first of the {self._inner.num_devices} devices of a replica along "
            f"{', '.join(map(repr, self._inner.axis_names))}, and the others idle",
            stacklevel=4,
        )


class StageWeights:
    """The weights of a stage for the executor: each tensor on one device of its home.

    Attributes:
        tensors: all tensors; one for each device of a replica that needs a weight.
        places: the index of each tensor's device in the home.
        copies: the numbers of copies, with the number of the original.
        fetched: the numbers of tensors that replicas fetch for each action, since they are cut over
            them.
    """

    def __init__(self, cell: Any, theta: Any, home: Home) -> None:
        self._theta = theta
        self.tensors: list[Any] = []
        self.places: list[int] = []
        self.copies: dict[int, int] = {}
        fetched: set[int] = set()
        self._counts: list[int] = []
        for weight, found in zip(theta.Flatten(), _held(cell, theta).Flatten(), strict=True):
            self._counts.append(len(found.holders))
            replica = found.replica
            if replica is None:
                replica = replica_of(found.variable, home)
            else:
                fetched.add(len(self.tensors))
            first = replica * home.group
            for number, holder in enumerate(found.holders):
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
            own = tuple(next(rest) for _ in range(count))
            packed.append(own if count > 1 else own[0])
        return self._theta.Pack(packed)


def _dims(layer: Any) -> set[str]:
    """Returns the names of the dims of a layer and its children."""
    found = set(layer.dims()) if isinstance(layer, NamedLayer) else set()
    return found.union(*map(_dims, _children(layer)))


def _weight_dims(layer: Any) -> set[str]:
    """Returns the names of the dims of the weights of a layer and its children."""
    shapes = layer.named_shapes.values() if isinstance(layer, NamedLayer) else ()
    found = {name for shape in shapes for name in shape.names}
    return found.union(*map(_weight_dims, _children(layer)))


def _children(layer: Any) -> list[Any]:
    found: list[Any] = []
    for child in layer.children.values():
        found += child if isinstance(child, list | tuple) else [child]
    return found


@dataclasses.dataclass(frozen=True)
class _Held:
    """A weight of a layer and its holders.

    Attributes:
        holders: the devices of a replica that need it; plain layers compute on the first one.
        variable: its variable, or None.
        replica: the replica that has it, if it is cut over replicas.
    """

    holders: tuple[int, ...]
    variable: Any
    replica: int | None = None


def _held(layer: Any, theta: Any) -> Any:
    """Returns the variable and the holders of each weight in a layer's theta."""
    if isinstance(layer, list | tuple):
        return [_held(part, own) for part, own in zip(layer, theta, strict=True)]
    parts = layer.weight_parts() if isinstance(layer, NamedLayer) else {}
    variables = layer.vars
    found = {}
    for name, value in theta.items():
        if name in layer.children:
            found[name] = _held(layer.children[name], value)
        elif name in parts:
            part = parts[name]
            found[name] = _Held(part.holders, variables.get(name), part.replica)
        else:
            found[name] = _Held((0,), variables.get(name))
    return py_utils.NestedMap(found)
