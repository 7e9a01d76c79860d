"""Slices of the weights of named layers, on the devices of a replica and cut over replicas."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.backend.operations import on_each
from pipemesh.backend.saved_state import Slice, SlicedVariable, slice_of
from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import setting
from pipemesh.errors import LayoutError, ShapeError
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape, TensorLayout


@dataclasses.dataclass(frozen=True)
class ReplicaCut:
    """The rules for dims that are split over the axis of the batch.

    Weights with such a dim are stored in slices on the replicas (stage 3 of ZeRO). Activations are
    split over that axis by their batch dim.

    Attributes:
        mesh: the mesh of all replicas: first their axis, then the axes of each replica.
        rules: the rules for all dims but the batch's.
        devices: the devices of all replicas while weights are made, otherwise empty.

    Example:
        >>> cut = ReplicaCut(Mesh.from_text("data:2"), LayoutRules.from_text("embed:data"))
        >>> str(cut.layout(Shape.of(vocab=6, embed=4))), cut.layout(Shape.of(vocab=6))
        ('vocab:6;embed:4/data', None)
    """

    mesh: Mesh
    rules: LayoutRules
    devices: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """Returns the axis of the replicas."""
        return self.mesh.axis_names[0]

    def layout(self, shape: Shape) -> TensorLayout | None:
        """Returns the layout of a weight on the replicas, or None if it is not cut over them."""
        layout = self.rules.tensor_layout(shape, self.mesh)
        return layout if self.axis in layout.split_axes else None

    def size_elsewhere(self, shape: Shape) -> int:
        """Returns the number of elements of a weight that a replica gets from others."""
        if self.layout(shape) is None:
            return 0
        return shape.size - shape.size // self.mesh.size(self.axis)


_current: contextvars.ContextVar[ReplicaCut | None] = contextvars.ContextVar("cut", default=None)
_stays: contextvars.ContextVar[bool] = contextvars.ContextVar("stays", default=False)


def replica_cut_scope(cut: ReplicaCut | None) -> contextlib.AbstractContextManager[Any]:
    """Sets the cut over replicas with which named layers inside are made, called and counted.

    Args:
        cut: the cut, or None for none.
    """
    return setting(_current, cut)


def current_replica_cut() -> ReplicaCut | None:
    """Returns the cut of the innermost scope, or None without a cut."""
    return _current.get()


def stays() -> bool:
    """Returns whether variables made now stay on the device of the scope."""
    return _stays.get()


def slice_groups(layout: TensorLayout) -> list[tuple[int, ...]]:
    """Returns the processors that hold each different slice, which the first of them owns."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for processor in range(layout.mesh.num_devices):
        groups.setdefault(layout.slice_begin(processor), []).append(processor)
    return [tuple(group) for group in groups.values()]


def slice_names(name: str, layout: TensorLayout) -> list[str]:
    """Returns the names of the variables of a weight, one for each different slice."""
    number = len(slice_groups(layout))
    return [name] if number == 1 else [f"{name}_slice_{k}" for k in range(number)]


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """A variable that holds a weight, or a slice of it."""

    name: str
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    # The processors that need it; the first of them owns it.
    holders: tuple[int, ...]
    # The replica that has it, if it is cut over the replicas of a stage.
    replica: int | None
    device: str  # empty if the scope decides

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Enters the device scope in which the variable must be made."""
        with setting(_stays, self.replica is not None), tf.device(self.device):
            yield


# Some dims need not divide over their axis: layers compute with equal slices, and the last one ends
# with zeros. Variables have the real rows alone, so gradients, norms, optimizers and checkpoints
# know nothing of padding. These are such dims, each with the number that the size of a slice is a
# multiple of.
Padding = Mapping[str, int]


def padded(shape: Shape, padding: Padding, rules: LayoutRules, mesh: Mesh) -> Shape:
    """Returns the shape that layers compute with."""
    for name in padding.keys() & set(shape.names):
        axis, size = rules.axis(name), shape[name].size
        parts = 1 if axis is None else mesh.size(axis)
        multiple = parts * padding[name]
        whole = -(-size // multiple) * multiple
        if size <= whole - whole // parts:
            raise LayoutError(
                f"dim {name!r} of the weight '{shape}' has size {size}; in {parts} slices, each a "
                f"multiple of {padding[name]}, the last one would have nothing but padding: lower "
                f"the multiple, or remove or change the rule '{name}:{axis}'"
            )
        shape = shape.replace(name, Dim(name, whole))
    return shape


def weight_parts(lowering: Lowering, name: str, shape: Shape, padding: Padding) -> list[WeightPart]:
    """Returns the variables of a weight, under the current cut over replicas."""
    cut, layout = _layout(lowering, shape, padding)
    devices = getattr(lowering, "devices", ()) if cut is None else cut.devices
    group = lowering.mesh.num_devices
    parts = []
    for slice_name, holders in zip(slice_names(name, layout), slice_groups(layout), strict=True):
        first = holders[0]
        begin = tuple(layout.slice_begin(first))
        sizes = zip(begin, layout.slice_shape, shape.sizes, strict=True)
        parts.append(
            WeightPart(
                name=slice_name,
                begin=begin,
                sizes=tuple(min(size, whole - start) for start, size, whole in sizes),
                # One device of a replica gets all slices, and joins them for the others.
                holders=holders if cut is None else (first % group,),
                replica=None if cut is None else first // group,
                device=devices[first] if devices else "",
            )
        )
    return parts


def _layout(
    lowering: Lowering, shape: Shape, padding: Padding
) -> tuple[ReplicaCut | None, TensorLayout]:
    """Returns the layout of a weight over the replicas if it is cut over them, else inside one."""
    cut = current_replica_cut()
    layout = None if cut is None else cut.layout(padded(shape, padding, cut.rules, cut.mesh))
    if layout is not None:
        return cut, layout
    shape = padded(shape, padding, lowering.rules, lowering.mesh)
    return None, lowering.tensor_layout(shape)


def from_parts(
    lowering: Lowering, parts: Sequence[Any], shape: Shape, padding: Padding, name: str
) -> Slices:
    """Gives each processor its slice without padding; `parts` has a tensor, or copies, for each
    weight part.
    """
    cut, layout = _layout(lowering, shape, padding)
    own = lowering.tensor_layout(padded(shape, padding, lowering.rules, lowering.mesh))
    if cut is None:
        return from_slices(lowering, parts, own, name)
    groups, group = slice_groups(own), lowering.mesh.num_devices
    slices: list[list[Any]] = [[] for _ in groups]
    for part, holders in zip(parts, slice_groups(layout), strict=True):
        number = next(n for n, held in enumerate(groups) if holders[0] % group in held)
        slices[number].append(tf.convert_to_tensor(part))
    dim = layout.axes.index(cut.axis)
    if group == 1:
        return (tf.concat(slices[0], dim),)
    # Each slice of a split weight is on the first processor that holds it.
    devices = [getattr(lowering, "devices", ())[held[0]] for held in groups]
    joined = [_join(each, dim, device) for each, device in zip(slices, devices, strict=True)]
    return from_slices(lowering, joined, own, name)


def held_by_processors(lowering: Lowering, values: Sequence[Any], name: str) -> Slices:
    """Converts one tensor for each processor, placed by the caller, to slices."""
    if len(values) != lowering.num_slices:
        raise ShapeError(
            f"weight {name!r} was given as {len(values)} tensors, but the lowering computes for "
            f"{lowering.num_slices} processors of mesh '{lowering.mesh}'; give one for each, in "
            "the order of their numbers, or a single whole tensor"
        )
    return tuple(map(tf.convert_to_tensor, values))


def from_whole(lowering: Lowering, whole: Any, layout: TensorLayout) -> Slices:
    """Gives each processor its slice, or copy, of a whole weight."""
    whole = tf.convert_to_tensor(whole)
    if lowering.mesh.num_devices == 1:
        return (whole,)
    return lowering.import_tensor(whole, layout)


def from_slices(
    lowering: Lowering, parts: Sequence[Any], layout: TensorLayout, name: str
) -> Slices:
    """Gives each processor its slice; `parts` has a tensor, or copies, for each slice."""
    if not isinstance(lowering, PlacementLowering):
        raise LayoutError(
            f"weight {name!r} lies in {len(parts)} variables on the devices of mesh "
            f"'{layout.mesh}', but {type(lowering).__name__} computes for a single core; pass the "
            f"core's own slice as a tuple of one: theta.{name} = (slice,)"
        )
    held: dict[int, tf.Tensor] = {}
    for part, group in zip(parts, slice_groups(layout), strict=True):
        if isinstance(part, list | tuple):
            copies = list(map(tf.convert_to_tensor, part))
        else:
            devices = [lowering.devices[processor] for processor in group]
            with tf.device(devices[0]):
                tensor = tf.convert_to_tensor(part)
            copies = _spread(tensor, devices)
            away = sum(device != devices[0] for device in devices)
            sent = away * math.prod(static_sizes(tensor)) * tensor.dtype.size
            lowering.costs.add_transfer("import", sent, backward=False)
        if len(copies) != len(group):
            raise ShapeError(
                f"a slice of weight {name!r} was given as {len(copies)} copies, but processors "
                f"{list(group)} of mesh '{layout.mesh}' hold it; give one for each, or one tensor"
            )
        held.update(zip(group, copies, strict=True))
    return tuple(held[processor] for processor in range(lowering.num_slices))


# Spreading and collecting are each other's gradients. Every copy has a copy of the whole gradient,
# so one of them is enough.


def _spread(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """Copies a tensor to each device."""
    if len(devices) == 1:
        return [tensor]
    with unrecorded():
        copies = on_each(devices, lambda: tf.identity(tensor))
    return attach_gradient(copies, [tensor], lambda grads: [_collect(grads, devices)], True)


def _collect(copies: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """Takes one of the copies."""
    with unrecorded(), tf.device(devices[0]):
        whole = tf.identity(copies[0])
    return attach_gradient([whole], copies, lambda grads: _spread(grads[0], devices), True)[0]


def _join(slices: Sequence[tf.Tensor], dim: int, device: str) -> tf.Tensor:
    """Joins slices on a device."""
    with unrecorded(), tf.device(device):
        whole = tf.concat(slices, dim)
    sizes = [static_sizes(slice_)[dim] for slice_ in slices]
    return attach_gradient([whole], slices, lambda g: _part(g[0], dim, device, sizes), True)[0]


def _part(whole: tf.Tensor, dim: int, device: str, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Cuts a tensor into slices on a device."""
    with unrecorded(), tf.device(device):
        slices = tf.split(whole, sizes, dim)
    return attach_gradient(slices, [whole], lambda grads: [_join(grads, dim, device)], True)


def by_logical_name(layer: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns variables by logical name, for a `tf.train.Checkpoint` valid under every layout.

    Args:
        layer: a lingvo layer; layers with named dims among its children may have cut weights.
        variables: variables of the layer, or of its optimizer. The names of the latter begin with
            the names of the layer's.

    Returns:
        Variables that are not cut, by logical name without `:0`. For each cut weight, and the
        optimizer's state of it, all slices as one.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers.named import FeedForward, by_logical_name, lowering_scope
        >>> from pipemesh.lowering import PlacementLowering
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("d_ff:model")
        >>> params = FeedForward.Params().Set(name="ff", input_dim=4, hidden_dim=8, use_bias=False)
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> with lowering_scope(lowering), py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> len(layer.vars.Flatten()), list(by_logical_name(layer, layer.vars.Flatten()))
        (4, ['ff/w_in/var', 'ff/w_out/var'])
    """
    slices = {v.name: slice_of(v) for v in layer.vars.Flatten()}
    whole: dict[str, Any] = {}
    parts: dict[str, list[tuple[tf.Variable, Slice]]] = {}
    for variable in variables:
        name = variable.name.removesuffix(":0")
        marked = slice_of(variable)
        if marked is None:
            # The optimizer's name follows the name of the weight.
            weight_name, _, state = name.rpartition("/")
            marked = slices.get(f"{weight_name}:0")
            if marked is None or variable.shape.rank != len(marked[1].whole):
                whole[name] = variable
                continue
            marked = f"{marked[0]}/{state}", marked[1]
        parts.setdefault(marked[0], []).append((variable, marked[1]))
    return whole | {
        name: SlicedVariable(slices_of_weight) for name, slices_of_weight in parts.items()
    }
