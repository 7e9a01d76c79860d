"""The communication of a program: bytes and calls per axis and primitive."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipemesh.mesh import Mesh
from pipemesh.text import columns


@dataclasses.dataclass
class CommunicationCosts:
    """Counts of the bytes and calls that one device sends, recorded while the program is built.

    A call inside a loop is built once and counts as many times as `repeated` was given. The bytes
    are for a slice of b bytes and a group of n members, under the usual ring algorithms:

    ==============  ====================
    primitive       bytes
    ==============  ====================
    all_reduce      2 b (n - 1) / n
    all_gather      b (n - 1)
    all_to_all      b (n - 1) / n
    reduce_scatter  b (n - 1) / n
    permute         b
    ==============  ====================

    An operation that communicates in another way counts its real bytes. For example,
    `TfCollectives` has no permute kernel, so its permutes count as all-gathers.

    Attributes:
        mesh: the mesh.
        rows: calls and bytes by axes, primitive and pass.
        transfers: calls and bytes of whole tensors that enter or leave the mesh under placement, by
            `"import"` or `"export"` and pass. They count the bytes between the first device and all
            others. They belong to no axis and are not in the table.

    Example:
        >>> costs = CommunicationCosts(Mesh.from_text("data:2;model:4"))
        >>> costs.add("all_reduce", ["model"], tf.zeros([2, 5]), backward=False)
        >>> costs.total_bytes
        60
        >>> print(costs)
        axes   primitive   pass     calls  bytes
        model  all_reduce  forward      1     60
        total                           1     60
    """

    mesh: Mesh
    rows: dict[tuple[tuple[str, ...], str, str], tuple[int, int]] = dataclasses.field(
        default_factory=dict
    )
    transfers: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    _times: int = 1

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Counts everything built inside, such as the body of a loop, `times` times.

        Args:
            times: number of iterations of the loop.
        """
        outside = self._times
        self._times = outside * times
        try:
            yield
        finally:
            self._times = outside

    def add(
        self,
        primitive: str,
        axes: Sequence[str],
        slice_: tf.Tensor,
        backward: bool,
        sent: int | None = None,
    ) -> None:
        """Counts one call.

        Args:
            primitive: `"all_reduce"`, `"all_gather"`, `"all_to_all"`, `"reduce_scatter"` or
                `"permute"`.
            axes: the axes along which devices communicate.
            slice_: the input of one device; counts as 0 bytes if its shape is not static.
            backward: whether the call belongs to the backward pass.
            sent: bytes to count instead of the usual number.
        """
        if sent is None:
            size = (slice_.shape.num_elements() or 0) * slice_.dtype.size
            sent = usual_bytes(primitive, size, math.prod(self.mesh.size(axis) for axis in axes))
        ordered = tuple(axis for axis in self.mesh.axis_names if axis in axes)
        key = (ordered, primitive, _pass_name(backward))
        calls, total = self.rows.get(key, (0, 0))
        self.rows[key] = (calls + self._times, total + sent * self._times)

    def add_transfer(self, name: str, sent: int, backward: bool) -> None:
        """Counts a whole tensor that enters or leaves the mesh.

        Args:
            name: `"import"` or `"export"`.
            sent: the bytes of all slices that move to another device.
            backward: whether the transfer belongs to the backward pass.
        """
        key = (name, _pass_name(backward))
        calls, total = self.transfers.get(key, (0, 0))
        self.transfers[key] = (calls + self._times, total + sent * self._times)

    def bytes(self, axis: str) -> int:
        """Returns the bytes sent along one axis, alone or together with other axes."""
        return sum(sent for (axes, _, _), (_, sent) in self.rows.items() if axis in axes)

    def calls(self, primitive: str) -> int:
        """Returns the number of calls of a primitive in both passes."""
        return sum(calls for (_, name, _), (calls, _) in self.rows.items() if name == primitive)

    @property
    def total_bytes(self) -> int:
        """Returns the bytes sent by one device."""
        return sum(sent for _, sent in self.rows.values())

    def clear(self) -> None:
        """Resets all counts."""
        self.rows.clear()
        self.transfers.clear()

    def __str__(self) -> str:
        table = [("axes", "primitive", "pass", "calls", "bytes")]
        for (axes, primitive, direction), (calls, sent) in sorted(self.rows.items()):
            table.append(("+".join(axes), primitive, direction, f"{calls:,}", f"{sent:,}"))
        total = sum(calls for calls, _ in self.rows.values())
        table.append(("total", "", "", f"{total:,}", f"{self.total_bytes:,}"))
        return "\n".join(columns(table, left=range(3)))


def usual_bytes(primitive: str, size: int, members: int) -> int:
    """Returns the bytes that one member of a group sends under the usual algorithms."""
    return {
        "all_reduce": 2 * size * (members - 1) // members,
        "all_gather": size * (members - 1),
        "all_to_all": size * (members - 1) // members,
        "reduce_scatter": size * (members - 1) // members,
        "permute": size,
    }[primitive]


def _pass_name(backward: bool) -> str:
    return "backward" if backward else "forward"
