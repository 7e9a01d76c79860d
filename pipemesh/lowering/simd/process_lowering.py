"""The part of a mesh that one of several processes computes, in one graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.collectives import Meeting
from pipemesh.backend.devices import check_devices_exist
from pipemesh.backend.processes import Processes, current_processes
from pipemesh.errors import DeviceError
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.placement import PlacementLowering, copies, tree
from pipemesh.lowering.simd.tf_collectives import MERGE, received, sendable
from pipemesh.mesh import LayoutRules, Mesh, TensorLayout

# Keys of groups and of operations count from here; those of `Cores` from 1, 1 << 29 and 1 << 30.
_KEYS = (1 << 30) + (1 << 29)
_instance_keys = itertools.count(_KEYS)
# Of what is said between steps: it must be understood even if programs differ.
_talk_keys = itertools.count(_KEYS + (1 << 28))
# By the devices that meet. Processes build the same programs in the same order and so count alike.
_group_keys: dict[tuple[str, ...], int] = {}
# For each device what puts its collectives into one order.
_tokens: dict[str, tf.Variable] = {}
# A line for each collective that was built.
_calls: list[str] = []


def calls() -> list[str]:
    """What collectives were built so far, in their order: the same in all processes."""
    return list(_calls)


@dataclasses.dataclass(frozen=True)
class _Group:
    """A group of processors along an axis, and who of them are here.

    Attributes:
        members: their numbers.
        held: for each process with some of them, where in the group these stand.
        here: for each of this process where it stands in the group, and in slices.
        key: of the group of those that stand for their processes; None if there is one process.
        device: of the one that stands for this process.
    """

    members: tuple[int, ...]
    held: dict[int, list[int]]
    here: dict[int, int]
    key: int | None
    device: str

    def meeting(self, instance: int) -> Meeting:
        """One of those that stand for their processes."""
        assert self.key is not None
        return Meeting(len(self.held), self.key, instance, _token(self.device))

    @property
    def most(self) -> int:
        """How many of them a process has at most."""
        return max(map(len, self.held.values()))

    def row(self, at: int) -> tuple[int, int]:
        """Where a member stands: which of the processes has it, and there which it is."""
        return next(
            (number, own.index(at)) for number, own in enumerate(self.held.values()) if at in own
        )


class ProcessLowering(PlacementLowering):
    """Lowers to one graph with a tensor for each processor of this process.

    Every process runs the same Python, and its graph has its own processors alone. What these
    exchange are copies, as under placement. What goes from process to process is a collective of
    TensorFlow's, in which one processor stands for all of its process: what is to be summed is
    summed inside of a process before, and what has come is copied afterwards.

    Args:
        mesh: of all processes together, or of a stage of it.
        rules: the layout rules.
        places: of each processor of the mesh its device, by its name in all processes.
        processes: all of them.

    Attributes:
        devices: of the processors of this process.
        processors: their numbers.
        places: as given.
        owners: of each processor of the mesh the number of its process.

    Raises:
        DeviceError: the number of places is not that of the mesh, or a device of this process does
            not exist.
        LayoutError: a rule names an unknown axis.
    """

    def __init__(
        self, mesh: Mesh, rules: LayoutRules, places: Sequence[str], processes: Processes
    ) -> None:
        Lowering.__init__(self, mesh, rules)
        if len(places) != mesh.num_devices:
            raise DeviceError(
                f"{len(places)} devices were given for mesh '{mesh}', which has "
                f"{mesh.num_devices} processors; give one device for each"
            )
        self.places, self._index = tuple(places), processes.index
        self.owners = tuple(map(processes.owner, places))
        self.processors = [i for i, owner in enumerate(self.owners) if owner == self._index]
        self.devices = check_devices_exist([places[i] for i in self.processors])

    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Reduces inside of each process, and then between them."""
        results, instance = list(x), _instance(f"all_reduce ({op})", axes, x)
        for group in self._groups(axes):
            devices = [self.devices[i] for i in group.here.values()]
            found = tree([x[i] for i in group.here.values()], devices, op)
            if group.key is not None and _has_elements(x):
                with tf.device(group.device):
                    whole = collectives.reduce(
                        sendable(found[0]), group.meeting(instance), MERGE[op]
                    )
                    whole = received(whole, found[0], found[0].shape)
                found = copies(whole, devices)
            for i, tensor in zip(group.here.values(), found, strict=True):
                results[i] = tensor
        return tuple(results)

    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins the slices of its group on each device."""
        results, instance = list(x), _instance("all_gather", [axis], x)
        for group in self._groups([axis]):
            parts = self._gathered(x, group, instance)
            for i in group.here.values():
                with tf.device(self.devices[i]):
                    results[i] = tf.concat(parts, dim)
        return tuple(results)

    def _gathered(self, x: Slices, group: _Group, instance: int) -> list[tf.Tensor]:
        """What all members have."""
        if group.key is None:
            return [x[group.here[at]] for at in range(len(group.members))]
        like = x[next(iter(group.here.values()))]
        if not _has_elements(x):
            return [like] * len(group.members)
        with tf.device(group.device):
            rows = [sendable(x[i]) for i in group.here.values()]
            rows += [tf.zeros_like(rows[0])] * (group.most - len(rows))
            came = collectives.gather(tf.stack(rows), group.meeting(instance))
            shape = [len(group.held), group.most, *like.shape]
            came = received(tf.reshape(came, shape), like, shape)
            return [came[group.row(at)] for at in range(len(group.members))]

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Gives each processor its piece of what each has."""
        results, instance = list(x), _instance("all_to_all", [axis], x)
        for group in self._groups([axis]):
            cut: dict[int, list[tf.Tensor]] = {}
            for at, i in group.here.items():
                with tf.device(self.devices[i]):
                    cut[at] = tf.split(x[i], len(group.members), split_dim)
            came = self._exchanged(cut, group, instance)
            for at, i in group.here.items():
                with tf.device(self.devices[i]):
                    results[i] = tf.concat(came[at], concat_dim)
        return tuple(results)

    @staticmethod
    def _exchanged(
        cut: dict[int, list[tf.Tensor]], group: _Group, instance: int
    ) -> dict[int, list[tf.Tensor]]:
        """For each member here what all of them have for it.

        Args:
            cut: for each member here its pieces, one for each member.
            group: the members.
            instance: key of the operation.
        """
        everyone, like = range(len(group.members)), next(iter(cut.values()))[0]
        if group.key is None:
            return {at: [cut[source][at] for source in everyone] for at in group.here}
        if not like.shape.num_elements():
            return {at: [like] * len(everyone) for at in group.here}
        with tf.device(group.device):
            nothing, most = tf.zeros_like(sendable(like)), range(group.most)
            pieces = [
                sendable(cut[source][to[n]]) if n < len(to) and source is not None else nothing
                for to in group.held.values()
                for source in [*cut, *[None] * (group.most - len(cut))]
                for n in most
            ]
            # For each process, of each sender, for each receiver there.
            shape = [len(group.held), group.most, group.most, *like.shape]
            given = tf.reshape(tf.stack(pieces), shape)
            came = received(collectives.all_to_all(given, group.meeting(instance)), like, shape)
            return {
                at: [came[(*group.row(source), number)] for source in everyone]
                for number, at in enumerate(group.here)
            }

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Copies inside of a process; between processes two processors meet."""
        source, instance = {b: a for a, b in pairs}, _instance("permute", [axis], x)
        # Each of a pair of devices is a source once at most, so that two keys are enough.
        next(_instance_keys)
        results, sent = list(x), []
        for group in self._groups([axis]):
            there = {at: owner for owner, own in group.held.items() for at in own}
            for a, b in pairs:
                if there[a] == there[b] or not _has_elements(x):
                    continue
                ends = self.places[group.members[a]], self.places[group.members[b]]
                key, number = _group_key(tuple(sorted(ends))), instance + (ends[0] > ends[1])
                if a in group.here:
                    with tf.device(ends[0]):
                        meeting = Meeting(2, key, number, _token(ends[0]))
                        sent.append(collectives.send(sendable(x[group.here[a]]), meeting))
                elif b in group.here:
                    like = x[group.here[b]]
                    with tf.device(ends[1]):
                        meeting = Meeting(2, key, number, _token(ends[1]))
                        came = collectives.receive(sendable(like), meeting)
                        results[group.here[b]] = received(came, like, like.shape)
            for at, i in group.here.items():
                with tf.device(self.devices[i]):
                    if source.get(at) in group.here:
                        results[i] = tf.identity(x[group.here[source[at]]])
                    elif at not in source or not _has_elements(x):
                        results[i] = tf.zeros_like(x[i])
        # What is sent must be, even if nobody here needs what comes.
        with tf.control_dependencies(sent):
            return self.raw_map(tf.identity, tuple(results))

    def _join(
        self, slices: Sequence[tf.Tensor], layout: TensorLayout, name: str, backward: bool
    ) -> tf.Tensor:
        """Joins the slices in each process, on its first device."""
        whole = tuple(slices)
        for dim, axis in enumerate(layout.axes):
            if axis is not None and self.mesh.size(axis) > 1:
                whole = self.raw_all_gather(whole, axis, dim)
        with tf.device(self.devices[0]):
            return tf.identity(whole[0])

    def _groups(self, axes: Sequence[str]) -> Iterator[_Group]:
        """The groups of processors along axes that have some in this process."""
        slot = {processor: i for i, processor in enumerate(self.processors)}
        for members in self.mesh.groups(axes):
            held: dict[int, list[int]] = {}
            for at, processor in enumerate(members):
                held.setdefault(self.owners[processor], []).append(at)
            held = dict(sorted(held.items()))
            first = {owner: self.places[members[own[0]]] for owner, own in held.items()}
            # Keys are counted for groups that are elsewhere, too.
            key = _group_key(tuple(first.values())) if len(held) > 1 else None
            if self._index in held:
                here = {at: slot[members[at]] for at in held[self._index]}
                yield _Group(members, held, here, key, first[self._index])


def placed(mesh: Mesh, rules: LayoutRules, places: Sequence[str]) -> PlacementLowering:
    """The part of a mesh that this process computes: all of it, if there is no other one.

    Args:
        mesh: the mesh.
        rules: the layout rules.
        places: as for `PlacementLowering`, or for `ProcessLowering` where there are others.
    """
    processes = current_processes()
    if processes is None:
        return PlacementLowering(mesh, rules, places)
    return ProcessLowering(mesh, rules, places, processes)


def over_processes(x: tf.Tensor, op: str) -> tf.Tensor:
    """Reduces what each process has one of; without others it is the result.

    Eagerly, too, if all processes do so.

    Args:
        x: in all processes of the same sizes.
        op: `"sum"`, `"max"` or `"min"`.
    """
    processes = current_processes()
    if processes is None:
        return x
    devices = tuple(processes.device(i, "CPU", 0) for i in range(len(processes)))
    here = devices[processes.index]
    talks = tf.executing_eagerly()
    instance = next(_talk_keys) if talks else _instance(op, ["processes"], (x,))
    meeting = Meeting(len(devices), _group_key(devices), instance, _token(here))
    with tf.device(here):
        return received(collectives.reduce(sendable(x), meeting, MERGE[op]), x, x.shape)


def _group_key(devices: tuple[str, ...]) -> int:
    return _group_keys.setdefault(devices, _KEYS + len(_group_keys))


def _instance(name: str, axes: Sequence[str], x: Slices) -> int:
    """The key of the next operation."""
    what = f"{x[0].dtype.name}{x[0].shape}" if x else ""
    _calls.append(f"{name} over {'+'.join(axes)} of {what}")
    return next(_instance_keys)


def _has_elements(x: Slices) -> bool:
    return x[0].shape.num_elements() != 0


def _token(device: str) -> tf.Tensor:
    if device not in _tokens:
        with tf.init_scope(), tf.device(device):
            _tokens[device] = tf.Variable(0.0, trainable=False)  # pyright: ignore[reportArgumentType]
    return _tokens[device].handle
