"""Predicts the memory of each device and the traffic between devices, before a run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.machine import Machine, channels_read, channels_written
from pipemesh.recurrent.table.run import Run
from pipemesh.schedule import Action, Schedule
from pipemesh.schedule.action import GRADS, KEPT, OUTPUTS, PENDING, REMADE


class Sizes:
    """Bytes on the devices of stages, known before anything runs."""

    def __init__(self, run: Run) -> None:
        self._stages = run.stages
        self._machine, self._machines = run.machine, run.machines
        self._modes = run.modes
        self._num_slices = run.num_slices
        # By stage, what slices of sequences hand on unchanged.
        self._shared = [
            traced.cut.shared(traced.carry) if run.num_slices > 1 else set()
            for traced in run.machine.traced
        ]

    def machine(self, piece: int) -> Machine:
        """Returns the machine of a microbatch, or of a slice of one."""
        return self._machines[piece % len(self._machines)]

    def weights(self, stage: int, places: Sequence[int]) -> int:
        """Returns the bytes of weights on devices of a home; a device has each weight once."""
        held = self._machine.stages[stage]
        chosen = [i for i in range(len(held.theta)) if not {*held.holders(i)}.isdisjoint(places)]
        return num_bytes(specs_of([held.theta[i] for i in chosen]))

    def variables(self, stage: int, places: Sequence[int]) -> int:
        """Returns the bytes of weights in their own dtype, of those that computation casts.

        Only the device that owns a weight has it in its own dtype.
        """
        given, held = self._stages[stage], self._machine.stages[stage]
        cast = []
        for i, weight in enumerate(given.theta):
            if given.owners[i] not in places or i in given.copies:
                continue
            # A number of Python's has no dtype; a variable of TF1 has one for references.
            dtype = tf.as_dtype(getattr(weight, "dtype", held.theta[i].dtype)).base_dtype
            if dtype != held.theta[i].dtype:
                cast.append(tf.TensorSpec(weight.shape, dtype))
        return num_bytes(cast)

    def weights_sent(self, stage: int) -> Mapping[tuple[int, int], int]:
        """Returns the bytes of a stage's weights sent from device to device of its home."""
        held, sent = self._machine.stages[stage], collections.Counter[tuple[int, int]]()
        for i, (spec, owner) in enumerate(zip(specs_of(held.theta), held.owners, strict=True)):
            for place in held.holders(i):
                sent[owner, place] += num_bytes([spec])
        return sent

    def weights_fetched(self, actions: Sequence[Action]) -> Iterator[Mapping[tuple[int, int], int]]:
        """Yields the bytes of weights of each fetch for all of a stage's actions.

        The bytes are by sending and receiving device.
        """
        first = self._machine.traced[actions[0].stage]
        if not first.stage.fetched:
            return
        for sharing in [actions] if first.keeps_fetched else [[action] for action in actions]:
            traced = self.machine(sharing[0].microbatch).traced[sharing[0].stage]
            nodes = set[str]().union(*map(self._nodes, self._kinds(sharing)))
            used = {tensor for tensor, _ in traced.cut.uses(nodes)}
            sent = collections.Counter[tuple[int, int]]()
            for name, owner in traced.fetched():
                if name in used:
                    sent[owner, traced.place(name)] += num_bytes([traced.spec(name)])
            yield sent

    def _kinds(self, actions: Sequence[Action]) -> Iterable[Action]:
        """Returns one of all actions of a stage that compute the same nodes."""
        modes = self._modes
        return {(a.kind, modes[a.stage, a.microbatch]): a for a in actions}.values()

    def weights_kept(self, stage: int, places: Sequence[int]) -> int:
        """Returns the bytes of fetched weights that devices of a home hold during a step."""
        traced = self._machine.traced[stage]
        kept = [name for name in traced.joined() if traced.place(name) in places]
        return num_bytes([*map(traced.spec, kept)])

    def sums_sent(self, stage: int) -> Mapping[tuple[int, int], int]:
        """Returns the bytes of summed gradients sent from device to device of the home."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        sent = collections.Counter[tuple[int, int]]()
        for total in passes.sums:
            sent[total.place, total.owner] += num_bytes([total.spec])
        return sent

    def sums(self, stage: int, place: int) -> int:
        """Returns the bytes of summed gradients on a device of a stage's home."""
        passes = self._machine.passes(stage, self._modes[stage, 0])
        return num_bytes([total.spec for total in passes.sums if total.place == place])

    def values(self, kind: str, stage: int, place: int, microbatch: int = 0) -> int:
        """Returns the bytes of a kind of value on a device of a stage's home."""
        machine, mode = self.machine(microbatch), self._modes[stage, microbatch]
        specs, places = machine.specs(kind, stage, mode), machine.places(kind, stage, mode)
        held = [
            (spec, name)
            for spec, name, at in zip(specs, machine.names(kind, stage, mode), places, strict=True)
            if at == place and spec is not None
        ]
        if kind not in (KEPT, REMADE, PENDING) or self._num_slices == 1:
            return num_bytes([spec for spec, _ in held])
        if len(self._machines) > 1:
            # The slice that made a part of the carry holds it for all later ones.
            traced = machine.traced[stage]
            taken = {*traced.carry[: traced.num_own * len(traced.replicas)]}
            own = [spec for spec, name in held if taken.isdisjoint(traced.cut.same_value(name))]
            return num_bytes(own)
        # Each slice but the last has one part of its own.
        cut, shared = machine.traced[stage].cut, self._shared[stage]
        names = {name for _, name in held if not shared.isdisjoint(cut.same_value(name))}
        parts = num_bytes([spec for spec, name in held if name in names])
        return num_bytes([spec for spec, _ in held]) - parts + parts // self._num_slices

    def handed_on(self, action: Action) -> Mapping[tuple[int, int], int]:
        """Returns the bytes sent to another home, by device indices of sender and receiver."""
        machine, stage = self.machine(action.microbatch), action.stage
        sent = collections.Counter[tuple[int, int]]()
        kind, step = (OUTPUTS, 1) if action.kind == "F" else (GRADS, -1)
        if action.kind not in "FBI" or not 0 <= stage + step < len(machine.stages):
            return sent
        ends = zip(machine.places(kind, stage), machine.arrival_places(kind, stage), strict=True)
        for spec, way in zip(machine.specs(kind, stage), ends, strict=True):
            sent[way] += 0 if spec is None else num_bytes([spec])
        return sent

    def crossing(self, action: Action) -> Mapping[tuple[int, int], int]:
        """Returns the bytes sent inside a home while an action computes, by sender and receiver."""
        traced = self.machine(action.microbatch).traced[action.stage]
        crossing = collections.Counter[tuple[int, int]]()
        sent: set[tuple[str, int]] = set()
        for tensor, node in traced.cut.uses(self._nodes(action)):
            source, target = traced.place(tensor), traced.place(f"{node}:0")
            # A tensor that several nodes of a device take is sent once.
            if source != target and (tensor, target) not in sent:
                sent.add((tensor, target))
                crossing[source, target] += num_bytes([traced.spec(tensor)])
        return crossing

    def _nodes(self, action: Action) -> set[str]:
        """Returns the nodes of its stage's graph that an action computes."""
        stage = action.stage
        mode = self._modes[stage, action.microbatch]
        machine = self.machine(action.microbatch)
        passes = machine.passes(stage, mode if action.kind in "FR" else mode.backward)
        return passes.cuts.nodes(action.kind, stage == 0)


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """The memory, in bytes, that a device keeps of the first microbatch for its backward pass."""

    kept: int
    kept_inputs: tuple[int, ...]  # 0 for inputs that are not kept
    kept_outputs: tuple[bool, ...]
    outputs: tuple[tf.TensorSpec, ...]
    pending: int = 0  # between an `I` and its `W`


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    Attributes:
        weights: the weights of its stages, once each, in the dtype of computation.
        gradients: the sums of their gradients.
        kept: the peak of the tensors kept for backward passes: results of forward passes or of an
            `R`, and tensors that an `I` leaves for its `W`. A tensor that two actions need counts
            twice, such as an output that is the input of another stage on the same device.
        stages: the memory that each of its stages keeps of one microbatch. Ignored in comparisons.
        device: its name. Ignored in comparisons.
        variables: the same weights in their own dtype, of those that computation casts to another.
        fetched: weights joined from the slices of all replicas, which a stage that is alone on its
            devices holds from the start of a step to its last action. 0 if each action fetches its
            own, which are temporary tensors.
    """

    weights: int
    gradients: int
    kept: int
    stages: tuple[StageMemory, ...] = dataclasses.field(default=(), compare=False, repr=False)
    device: str = dataclasses.field(default="", compare=False, repr=False)
    variables: int = 0
    fetched: int = 0

    @property
    def total(self) -> int:
        """The sum of all of these, without temporary tensors of actions."""
        return self.weights + self.variables + self.fetched + self.gradients + self.kept


def predict_memory(
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    *,
    step: tf.Tensor | None = None,
    options: Options | None = None,
) -> list[DeviceMemory]:
    """Predicts the memory that `pipeline` or `pipeline_loss` would need with these arguments.

    It traces the stages and runs nothing. Call it inside a `tf.function` or a TF1 graph.

    Args:
        stages, inputs, schedule, step, options: as for `pipeline`.

    Returns:
        The memory of each device, ordered by the rows of the schedule. For a device that a home
        names several times it includes all of its replicas, but the weights once.

    Raises:
        PipelineError, ScheduleError: as for `pipeline`.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.schedule import gpipe, one_f_one_b
        >>> def scale(theta, carry, inputs, microbatch, step):
        ...     return [tf.nn.tanh(inputs[0] * theta[0])], []
        >>> with tf.Graph().as_default():
        ...     stages = [Stage(f"s{i}", scale, [tf.ones([10])], [], "CPU:0") for i in range(2)]
        ...     for builder in (gpipe, one_f_one_b):
        ...         memory = predict_memory(stages, [tf.ones([8, 10])], builder(2, 8))
        ...         print([device.kept for device in memory])
        [320, 320]
        [80, 40]
    """
    return memory_of(Run(stages, inputs, schedule, step, options or Options()))


def memory_of(run: Run) -> list[DeviceMemory]:
    """Returns the memory that a run needs; see `predict_memory`.

    Args:
        run: the argument of `Options.noted_run`.
    """
    stages, schedule, sizes = run.stages, run.schedule, Sizes(run)
    recomputed = schedule.recomputed()
    memories = []
    for home, row in enumerate(schedule.rows):
        home_stages = [s for s, owner in enumerate(schedule.stage_devices) if owner == home]
        devices = stages[home_stages[0]].devices
        for device in dict.fromkeys(devices):
            places = [number for number, name in enumerate(devices) if name == device]
            held = peak = 0
            for action in row:
                stage, m = action.stage, action.microbatch
                is_recomputed = (stage, m) in recomputed
                changes = [(1, channel) for channel in channels_written(action.kind, stage)]
                changes += [
                    (-1, channel) for channel in channels_read(action.kind, stage, is_recomputed)
                ]
                held += sum(
                    sign * sizes.values(channel.kind, stage, place, m)
                    for sign, channel in changes
                    if channel.kind in (KEPT, REMADE, PENDING) and not schedule.is_forward_only
                    for place in places
                )
                peak = max(peak, held)
            weights = sum(sizes.weights(s, places) for s in home_stages)
            variables = sum(sizes.variables(s, places) for s in home_stages)
            fetched = sum(sizes.weights_kept(s, places) for s in home_stages)
            gradients = 0
            if not schedule.is_forward_only:
                gradients = sum(sizes.sums(s, p) for s in home_stages for p in places)
            stage_memories = tuple(_of_stage(run, sizes, s, places[0]) for s in home_stages)
            memories.append(
                DeviceMemory(weights, gradients, peak, stage_memories, device, variables, fetched)
            )
    return memories


def _of_stage(run: Run, sizes: Sizes, stage: int, place: int) -> StageMemory:
    traced = run.machine.traced[stage]
    kept = run.machine.passes(stage, run.modes[stage, 0]).cuts.kept
    # A kept input may have the name of an identity of it.
    names = {same for name in kept for same in traced.cut.same_value(name)}
    inputs, outputs = (
        [name for name in every if traced.place(name) == place]
        for every in (traced.inputs, traced.outputs)
    )
    halves = any(action.kind == "I" for row in run.schedule.rows for action in row)
    return StageMemory(
        kept=sizes.values(KEPT, stage, place),
        kept_inputs=tuple(num_bytes([traced.spec(n)]) if n in names else 0 for n in inputs),
        kept_outputs=tuple(not names.isdisjoint(traced.cut.same_value(name)) for name in outputs),
        outputs=tuple(map(traced.spec, outputs)),
        pending=sizes.values(PENDING, stage, place) if halves else 0,
    )


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The traffic of one kind from one device to another in a step.

    Attributes:
        what: `inputs`, `activations` or their `gradients` from stage to stage, `outputs`; `weights`
            to the other replicas of a stage, and `weight gradients` back; `accumulators` from
            replica to replica; `inside a stage` for traffic between the devices of a replica while
            actions compute.
        source: the sending device.
        target: the receiving device.
        times: number of sends per step; tensors that are ready at once count once.
        bytes: in total.
    """

    what: str
    source: str
    target: str
    times: int
    bytes: int


def predict_transfers(
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    *,
    step: tf.Tensor | None = None,
    options: Options | None = None,
) -> list[Transfer]:
    """Predicts the traffic between devices of `pipeline` or `pipeline_loss` with these arguments.

    A stage with several replicas sends its weights once per step. If its home has other stages too,
    it sends `fetched` weights once per action that uses them. The sums of their gradients come back
    once, for any number of microbatches. Traffic to and from the caller is not counted (the batch,
    its gradients), nor are the scalars of checks.

    It traces the stages and runs nothing. Call it inside a `tf.function` or a TF1 graph.

    Args:
        stages, inputs, schedule, step, options: as for `pipeline`.

    Returns:
        One transfer for each kind and pair of devices with traffic.

    Raises:
        PipelineError, ScheduleError: as for `pipeline`.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.recurrent import Stage
        >>> from pipemesh.schedule import one_f_one_b
        >>> def scale(theta, carry, inputs, microbatch, step):
        ...     return [inputs[0] * theta[0]], []
        >>> with tf.Graph().as_default():
        ...     home = ("CPU:0", "CPU:1")
        ...     stage = Stage("scale", scale, [tf.ones([10])], [], home)
        ...     found = predict_transfers([stage], [tf.ones([8, 10])], one_f_one_b(1, 4))
        >>> for t in found:
        ...     print(t.what, "from", t.source, "to", t.target, t.times, "times", t.bytes, "bytes")
        inputs from CPU:0 to CPU:1 4 times 160 bytes
        outputs from CPU:1 to CPU:0 4 times 160 bytes
        weight gradients from CPU:1 to CPU:0 1 times 40 bytes
        weights from CPU:0 to CPU:1 1 times 40 bytes
    """
    return transfers_of(Run(stages, inputs, schedule, step, options or Options()))


def transfers_of(run: Run, inside: bool = True) -> list[Transfer]:
    """Returns the traffic of a run; see `predict_transfers`.

    Args:
        run: the argument of `Options.noted_run`.
        inside: whether to count traffic between the devices of a replica inside actions, which
            takes a pass over all of their nodes.
    """
    times: collections.Counter[tuple[str, str, str]] = collections.Counter()
    sums: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for what, source, target, size in _each(run, inside):
        if source != target and size:
            times[what, source, target] += 1
            sums[what, source, target] += size
    return [Transfer(*key, times[key], sums[key]) for key in sorted(sums)]


def _each(run: Run, inside: bool) -> Iterator[tuple[str, str, str, int]]:
    """Yields kind, source, target and bytes of each tensor passed on, also within a device."""
    stages, schedule, sizes = run.stages, run.schedule, Sizes(run)
    first, last = run.machine.traced[0], len(stages) - 1
    for s, stage in enumerate(stages):
        for number, of in stage.copies.items():
            size = num_bytes(specs_of([stage.theta[number]]))
            yield "weights", stage.theta_devices[of], stage.theta_devices[number], size
        actions = [a for row in schedule.rows for a in row if a.stage == s]
        inside_home = [("weights", sizes.weights_sent(s))]
        inside_home += [("weights", fetch) for fetch in sizes.weights_fetched(actions)]
        if not schedule.is_forward_only:
            inside_home.append(("weight gradients", sizes.sums_sent(s)))
        for what, sent in inside_home:
            for (source, target), size in sent.items():
                yield what, stage.devices[source], stage.devices[target], size
    for action in (action for row in schedule.rows for action in row):
        s = action.stage
        home = stages[s].of_home
        for place, device in enumerate(home.devices):
            if action.kind == "F":
                if s == 0:
                    inputs = [name for name in first.inputs if first.place(name) == place]
                    size = num_bytes([*map(first.spec, inputs)])
                    yield "inputs", home.first, device, size
                if s == last:
                    to = home.devices[place % home.group]
                    yield "outputs", device, to, sizes.values(OUTPUTS, s, place)
                if place % home.group == 0 and not stages[s].recurrent:
                    following = home.devices[(place + home.group) % len(home)]
                    yield (
                        "accumulators",
                        device,
                        following,
                        num_bytes(specs_of(run.machine.stages[s].carry)),
                    )
        for (source, target), size in sizes.handed_on(action).items():
            what, to = ("activations", s + 1) if action.kind == "F" else ("gradients", s - 1)
            yield what, home.devices[source], stages[to].devices[target], size
        if inside and home.group > 1:
            for (source, target), size in sizes.crossing(action).items():
                yield "inside a stage", home.devices[source], home.devices[target], size
