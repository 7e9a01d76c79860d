"""Placement: one graph for all devices, with one device per slice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.devices import check_devices_exist
from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.backend.operations import sum_in_order
from pipemesh.errors import DeviceError
from pipemesh.lowering.given import whole_tensor
from pipemesh.lowering.local_gradient import local_gradient
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.mesh import LayoutRules, Mesh, TensorLayout

_PAIRWISE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": lambda a, b: sum_in_order([a, b]),
    "max": tf.maximum,
    "min": tf.minimum,
}


class PlacementLowering(Lowering):
    """A lowering to one graph with one tensor per device.

    Communication is plain TensorFlow: copies between devices, sums and concats; NCCL between the
    GPUs of one host. In graphs (`tf.function` or TF1) every operation on a slice and its gradient
    is on the slice's device. Eager mode computes the same values, but TensorFlow places gradients
    as it likes.

    Attributes:
        devices: the device of each processor.

    Raises:
        DeviceError: the number of devices is not that of the mesh, or one does not exist.
        LayoutError: a rule names an unknown axis.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.mesh import LayoutRules, Mesh, Shape
        >>> mesh, rules = Mesh.from_text("data:2"), LayoutRules.from_text("batch:data")
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> layout = lowering.tensor_layout(Shape.of(batch=4))
        >>> slices = lowering.import_tensor(tf.constant([1, 2, 3, 4]), layout)
        >>> [part.numpy().tolist() for part in slices]
        [[1, 2], [3, 4]]
        >>> lowering.all_reduce(slices, ["data"])[0].numpy().tolist()
        [4, 6]
    """

    def __init__(self, mesh: Mesh, rules: LayoutRules, devices: Sequence[str]) -> None:
        super().__init__(mesh, rules)
        self.devices = check_devices_exist(devices)
        if len(devices) != mesh.num_devices:
            raise DeviceError(
                f"{len(devices)} devices were given for mesh '{mesh}', which has "
                f"{mesh.num_devices} processors; give one device for each"
            )

    @property
    def num_slices(self) -> int:
        """Returns the number of devices."""
        return len(self.devices)

    def map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function on each device."""
        with self.computing_slices():
            return tuple(
                local_gradient(function, [operand[i] for operand in operands], device)
                for i, device in enumerate(self.devices)
            )

    def raw_map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function on each device, without a gradient."""
        results: list[tf.Tensor] = []
        for i, device in enumerate(self.devices):
            with tf.device(device):
                results.append(function(*(operand[i] for operand in operands)))
        return tuple(results)

    def coordinate(self, axis: str) -> Slices:
        """Returns constants, one for each device."""
        at = [self.mesh.coordinates(processor)[axis] for processor in range(self.num_slices)]
        results: list[tf.Tensor] = []
        for value, device in zip(at, self.devices, strict=True):
            with tf.device(device):
                results.append(tf.constant(value, tf.int32))
        return tuple(results)

    def with_gradient(
        self,
        forward: Callable[[Slices], Slices],
        backward: Callable[[Slices], Slices],
        slices: Slices,
    ) -> Slices:
        """Computes `forward(slices)` with the gradient that `backward` computes."""
        with unrecorded():
            outputs = forward(slices)
        if not slices[0].dtype.is_floating:
            return outputs
        return tuple(attach_gradient(outputs, slices, lambda g: backward(tuple(g)), True))

    def import_tensor(self, tensor: tf.Tensor, layout: TensorLayout) -> Slices:
        """Cuts the tensor on its own device, and sends each device its slice."""
        tensor = tf.convert_to_tensor(tensor)
        with _beside(tensor):
            tensor = whole_tensor(tensor, layout)
        return self._import(tensor, layout, "import", backward=False)

    def export_tensor(self, slices: Slices, layout: TensorLayout) -> tf.Tensor:
        """Joins the slices on the first device."""
        return self._export(slices, layout, "export", backward=False)

    # `_import` and `_export` are each other's gradient. `name` and `backward` select the row of the
    # costs.

    def _import(self, tensor: tf.Tensor, layout: TensorLayout, name: str, backward: bool) -> Slices:
        with unrecorded():
            slices = self._scatter(tensor, layout, name, backward)
        if not tensor.dtype.is_floating:
            return tuple(slices)

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [self._export(tuple(grads), layout, name, backward=True)]

        return tuple(attach_gradient(slices, [tensor], back, True))

    def _export(self, slices: Slices, layout: TensorLayout, name: str, backward: bool) -> tf.Tensor:
        with unrecorded():
            whole = self._join(slices, layout, name, backward)
        if not whole.dtype.is_floating:
            return whole

        def back(grads: Sequence[tf.Tensor]) -> Slices:
            return self._import(grads[0], layout, name, backward=True)

        return attach_gradient([whole], slices, back, True)[0]

    def _scatter(
        self, tensor: tf.Tensor, layout: TensorLayout, name: str, backward: bool
    ) -> list[tf.Tensor]:
        """Cuts the tensor on its own device, so that only the slices are sent."""
        tensor = tf.convert_to_tensor(tensor)
        cuts: dict[tuple[int, ...], tf.Tensor] = {}
        slices: list[tf.Tensor] = []
        with _beside(tensor):
            for processor in range(self.num_slices):
                begin = layout.slice_begin(processor)
                if begin not in cuts:
                    cuts[begin] = tf.slice(tensor, *_begin_and_size(layout, processor))
        for processor, device in enumerate(self.devices):
            with tf.device(device):
                slices.append(tf.identity(cuts[layout.slice_begin(processor)]))
        away = sum(device != self.devices[0] for device in self.devices)
        sent = away * math.prod(layout.slice_shape) * tensor.dtype.size
        self.costs.add_transfer(name, sent, backward)
        return slices

    def _join(
        self, slices: Sequence[tf.Tensor], layout: TensorLayout, name: str, backward: bool
    ) -> tf.Tensor:
        """Joins one copy of each slice on the first device."""
        used: list[int] = []

        def join(dim: int, at: dict[str, int]) -> tf.Tensor:
            if dim == len(layout.axes):
                used.append(self.mesh.processor(at))
                return slices[used[-1]]
            axis = layout.axes[dim]
            if axis is None:
                return join(dim + 1, at)
            parts = [join(dim + 1, {**at, axis: i}) for i in range(self.mesh.size(axis))]
            return tf.concat(parts, dim)

        with tf.device(self.devices[0]):
            whole = tf.identity(join(0, {}))
        away = sum(self.devices[i] != self.devices[0] for i in used)
        sent = away * math.prod(layout.slice_shape) * whole.dtype.size
        self.costs.add_transfer(name, sent, backward)
        return whole

    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Reduces pairwise in a tree and copies the result back, or uses NCCL."""
        results = list(x)
        for group in self.mesh.groups(axes):
            tensors, devices = [x[i] for i in group], [self.devices[i] for i in group]
            if collectives.can_use_nccl(tensors, devices):
                reduced = collectives.nccl_all_reduce(tensors, devices, op)
            else:
                reduced = tree(tensors, devices, op)
            for i, tensor in zip(group, reduced, strict=True):
                results[i] = tensor
        return tuple(results)

    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins the slices of each group on every device of it."""
        results = list(x)
        for group in self.mesh.groups([axis]):
            for i in group:
                with tf.device(self.devices[i]):
                    results[i] = tf.concat([x[j] for j in group], dim)
        return tuple(results)

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Splits on the sending device and joins on the receiving one."""
        parts = self.mesh.size(axis)
        results = list(x)
        for group in self.mesh.groups([axis]):
            pieces: list[list[tf.Tensor]] = []
            for i in group:
                with tf.device(self.devices[i]):
                    pieces.append(tf.split(x[i], parts, split_dim))
            for at, i in enumerate(group):
                with tf.device(self.devices[i]):
                    results[i] = tf.concat([piece[at] for piece in pieces], concat_dim)
        return tuple(results)

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Copies between devices."""
        source = {b: a for a, b in pairs}
        results = list(x)
        for group in self.mesh.groups([axis]):
            for at, i in enumerate(group):
                with tf.device(self.devices[i]):
                    results[i] = (
                        tf.identity(x[group[source[at]]]) if at in source else tf.zeros_like(x[i])
                    )
        return tuple(results)


def _beside(tensor: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that places operations on the device of a tensor."""
    if tf.is_symbolic_tensor(tensor):
        graph = tf.compat.v1.get_default_graph()
        return graph.colocate_with(tensor.op, ignore_existing=True)
    return tf.device(tensor.device)


def _begin_and_size(layout: TensorLayout, processor: int) -> tuple[tf.Tensor, tf.Tensor]:
    rank = len(layout.axes)
    begin = tf.constant(layout.slice_begin(processor), tf.int32, shape=[rank])
    return begin, tf.constant(layout.slice_shape, tf.int32, shape=[rank])


def tree(tensors: Sequence[tf.Tensor], devices: Sequence[str], op: str) -> list[tf.Tensor]:
    """Reduces in n - 1 operations of depth log n; all members get bitwise equal results."""
    partial = list(tensors)
    step = 1
    while step < len(partial):
        for i in range(0, len(partial) - step, 2 * step):
            with tf.device(devices[i]):
                partial[i] = _PAIRWISE[op](partial[i], partial[i + step])
        step *= 2
    return copies(partial[0], devices)


def copies(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """Copies a tensor to each device, without a gradient."""
    results: list[tf.Tensor] = []
    for device in devices:
        with tf.device(device):
            results.append(tf.identity(tensor))
    return results
