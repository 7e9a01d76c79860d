"""Predicts the traffic between devices in a step, before it runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.run import Run
from pipemesh.recurrent.table.values import OUTPUTS
from pipemesh.schedule import Schedule
from pipemesh.text import columns


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

    A stage with several replicas sends its weights once per step, and `fetched` weights once per
    action that uses them. The sums of their gradients come back once, for any number of
    microbatches. Traffic to and from the caller is not counted (the batch, its gradients), nor are
    the scalars of checks.

    It traces the stages and runs nothing. Call it inside a `tf.function` or a TF1 graph.

    Args:
        stages: as for `pipeline`.
        inputs: as for `pipeline`.
        schedule: as for `pipeline`.
        step: as for `pipeline`.
        options: as for `pipeline`.

    Returns:
        One transfer for each kind and pair of devices with traffic.

    Raises:
        PipelineError: see `pipeline`.
        ScheduleError: see `pipeline`.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.recurrent import Home, Stage
        >>> from pipemesh.schedule import one_f_one_b
        >>> def scale(theta, carry, inputs, microbatch, step):
        ...     return [inputs[0] * theta[0]], []
        >>> homes = [Home(("CPU:0", "CPU:1")), Home(("CPU:2", "CPU:3"))]
        >>> with tf.Graph().as_default():
        ...     stages = [Stage(f"s{i}", scale, [tf.ones([10])], [], homes[i]) for i in range(2)]
        ...     found = predict_transfers(stages, [tf.ones([8, 10])], one_f_one_b(2, 4))
        >>> from pipemesh.recurrent.transfers import table
        >>> print(table(found))
        what              from   to     times  bytes
        activations       CPU:0  CPU:2      4    160
        activations       CPU:1  CPU:3      4    160
        gradients         CPU:2  CPU:0      4    160
        gradients         CPU:3  CPU:1      4    160
        inputs            CPU:0  CPU:1      4    160
        outputs           CPU:3  CPU:2      4    160
        weight gradients  CPU:1  CPU:0      1     40
        weight gradients  CPU:3  CPU:2      1     40
        weights           CPU:0  CPU:1      1     40
        weights           CPU:2  CPU:3      1     40
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


def table(transfers: Sequence[Transfer]) -> str:
    """Returns transfers as a table, one per line."""
    rows = [("what", "from", "to", "times", "bytes")]
    rows += [(t.what, t.source, t.target, str(t.times), f"{t.bytes:,}") for t in transfers]
    return "\n".join(columns(rows, left=(0, 1, 2)))


def _each(run: Run, inside: bool) -> Iterator[tuple[str, str, str, int]]:
    """Yields kind, source, target and bytes of each tensor passed on, also within a device."""
    stages, schedule = run.stages, run.schedule
    last = len(stages) - 1
    for s, stage in enumerate(stages):
        for number, of in stage.copies.items():
            size = num_bytes(specs_of([stage.theta[number]]))
            yield "weights", stage.theta_devices[of], stage.theta_devices[number], size
        for (source, target), size in run.sizes.weights_sent(s).items():
            yield "weights", stage.devices[source], stage.devices[target], size
        sums = {} if schedule.is_forward_only else run.sizes.sums_sent(s)
        for (source, target), size in sums.items():
            yield "weight gradients", stage.devices[source], stage.devices[target], size
    for action in (action for row in schedule.rows for action in row):
        s = action.stage
        home = stages[s].of_home
        for place, device in enumerate(home.devices):
            if action.kind == "F":
                if s == 0:
                    yield "inputs", home.first, device, run.sizes.values(OUTPUTS, -1, place)
                if s == last:
                    to = home.devices[place % home.group]
                    yield "outputs", device, to, run.sizes.values(OUTPUTS, s, place)
                if place % home.group == 0:
                    following = home.devices[(place + home.group) % len(home)]
                    yield "accumulators", device, following, run.sizes.carries(s)
        for (source, target), size in run.sizes.handed_on(action).items():
            what, to = ("activations", s + 1) if action.kind == "F" else ("gradients", s - 1)
            yield what, home.devices[source], stages[to].devices[target], size
        for (source, target), size in run.sizes.weights_fetched(action).items():
            yield "weights", home.devices[source], home.devices[target], size
        if inside and home.group > 1:
            for (source, target), size in run.sizes.crossing(action).items():
                yield "inside a stage", home.devices[source], home.devices[target], size
