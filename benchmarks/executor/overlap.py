"""Stages and links that wait: how much of the sums of gradients, and of fetches of weights, hides.

Each stage has two replicas, on two devices. A link waits in place of the sum of a stage's
gradients, one sum after the other, or each device waits for weights that it fetches. The same
compiled step runs in turn with links that wait and with links that do not, so the time by which it
is longer can be held against `Timeline.end`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.schedule import Costs, Timeline, build, simulate

PLACES, REPLICAS, MICROBATCHES = 4, 2, 8
FORWARD, BACKWARD = 0.040, 0.080  # Seconds of a device's share of the model.
SUM = 0.240  # Seconds of the sums of a device's stages.
FETCH = 0.080  # Of the weights of one of two stages of a device, for each action.
BAR = 0.05  # The most that the hidden share is off the simulated one.


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, and whether sums or fetches wait under it."""

    schedule: str
    share: int = 1  # stages a device
    has_large_end: bool = False  # as a language model's last stage, with its vocabulary
    fetches: bool = False  # weights, instead of sums of gradients

    @property
    def costs(self) -> Costs:
        """Costs of a device's stages."""
        number = PLACES * self.share
        links = [(FETCH if self.fetches and self.share > 1 else SUM) / self.share] * number
        if self.has_large_end:
            links = [SUM / 8] * (number - 1) + [SUM]
        what = {"all_gather" if self.fetches else "gradient_sum": links}
        return Costs(FORWARD / self.share, BACKWARD / self.share, **what)


CASES = {
    "one_f_one_b": Case("one_f_one_b"),
    "one_f_one_b, large last stage": Case("one_f_one_b", has_large_end=True),
    "zb_h1, large last stage": Case("zb_h1", has_large_end=True),
    "interleaved_one_f_one_b": Case("interleaved_one_f_one_b", 2),
    "looped_bfs": Case("looped_bfs", 2),
    "zb_v": Case("zb_v", 2),
    "fetches, one_f_one_b": Case("one_f_one_b", fetches=True),
    "fetches, one_f_one_b, large last stage": Case("one_f_one_b", 1, True, True),
    "fetches, interleaved_one_f_one_b": Case("interleaved_one_f_one_b", 2, fetches=True),
    "fetches, zb_v": Case("zb_v", 2, fetches=True),
}
FORMS = {"actions": False, "loop": True}


class Links:
    """Links that wait in place of sums, each for one sum at a time, and in place of fetches.

    Attributes:
        slow: whether they wait at all.
    """

    def __init__(self) -> None:
        self.slow = False
        self._locks = [threading.Lock() for _ in range(PLACES)]

    def waiting(
        self, seconds: float, work: Callable[..., Any], tensors: Sequence[Any], place: int | None
    ) -> Any:
        """The result of some work on tensors of one shape, behind a wait of a place's link."""
        import tensorflow as tf

        def wait(*values: Any) -> Any:
            if self.slow:
                with contextlib.nullcontext() if place is None else self._locks[place]:
                    time.sleep(seconds)
            return work(*values)

        result = tf.numpy_function(wait, tensors, tf.float32, stateful=False)
        result.set_shape(tensors[0].shape)
        return result

    def fetched(self, seconds: float, weight: Any, devices: Sequence[str]) -> Any:
        """A weight of the executor whose device has waited for it; devices fetch independently."""
        import tensorflow as tf

        with tf.device(devices[weight.target]):
            tensor = self.waiting(seconds, lambda value: value, [weight.tensor], None)
        return weight._replace(tensor=tensor)


@contextlib.contextmanager
def slow_links(links: Links, case: Case, places: Sequence[int]) -> Iterator[None]:
    """Steps that are built inside wait for links where the executor sums or fetches."""
    from pipemesh.recurrent.table import machine

    own = machine.sum_in_order, machine.Machine.total_gradients, machine.weights_of
    own_sum, own_total, own_weights = own
    own_action = machine.for_action
    costs = case.costs.per_stage(len(places))

    def total(self: Any, stage: int, state: Any) -> Any:
        seconds, place = costs.gradient_sum[stage], places[stage]

        def add(*parts: Any) -> Any:
            return np.sum(parts, axis=0, dtype=np.float32)

        machine.sum_in_order = lambda parts: links.waiting(seconds, add, parts, place)
        try:
            return own_total(self, stage, state)
        finally:
            machine.sum_in_order = own_sum

    def weights_of(traced: Any, thetas: Any) -> Any:
        weights, devices = own_weights(traced, thetas), traced.stage.devices
        seconds = costs.all_gather[int(traced.stage.name.removeprefix("stage"))]
        if not traced.keeps_fetched:
            return weights
        return [links.fetched(seconds, weight, devices) for weight in weights]

    def for_action(weights: Any, devices: Any, *rest: Any) -> Any:
        tensors = own_action(weights, devices, *rest)
        if not weights[0].is_fetched:
            return tensors
        pairs = zip(weights, tensors, strict=True)
        given = [weight._replace(tensor=tensor) for weight, tensor in pairs]
        # All stages of these cases take as long.
        return [links.fetched(costs.all_gather[0], each, devices).tensor for each in given]

    if case.fetches:
        machine.weights_of, machine.for_action = weights_of, for_action
    else:
        machine.Machine.total_gradients = total
    try:
        yield
    finally:
        machine.Machine.total_gradients, machine.weights_of = own_total, own_weights
        machine.for_action = own_action


def waiting_step(name: str, loop: bool, links: Links) -> tuple[Callable[[], Any], Timeline]:
    """The compiled step of a case, and its simulation."""
    import tensorflow as tf

    from pipemesh.recurrent import Home, Options, Stage, pipeline_loss

    case = CASES[name]
    schedule, costs = build(case.schedule, PLACES, MICROBATCHES), case.costs
    number = schedule.num_stages
    splits = any(action.kind == "W" for row in schedule.rows for action in row)
    durations = costs.per_stage(number).durations()

    def wait(kind: str, stage: int, *arguments: Any) -> Any:
        def cell(x: Any, *_: Any) -> Any:
            time.sleep(durations[kind][stage])
            return x

        result = tf.numpy_function(cell, arguments, tf.float32, stateful=False)
        result.set_shape(arguments[0].shape)
        return result

    def forward_of(stage: int) -> Any:
        @tf.custom_gradient
        def layer(x: Any, weight: Any) -> Any:
            y = wait("F", stage, x * weight)

            def grad(dy: Any) -> Any:
                dx = wait("I" if splits else "B", stage, dy * weight, y)
                dw = tf.reduce_sum(dx * x)
                return dx, wait("W", stage, dw) if splits else dw

            return y, grad

        def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
            del carry, microbatch, step
            y = layer(inputs[0], theta[0])
            return [tf.reduce_sum(y) if stage == number - 1 else y], []

        return forward

    weights = [tf.Variable(1.0) for _ in range(number)]
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=[MICROBATCHES * REPLICAS]).astype(np.float32))

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            stages = []
            for stage in range(number):
                first = REPLICAS * schedule.stage_devices[stage]
                home = Home(tuple(f"CPU:{first + replica}" for replica in range(REPLICAS)))
                theta = [tf.convert_to_tensor(weights[stage])]
                fetched = frozenset({0} if case.fetches else ())
                forward = forward_of(stage)
                stages.append(Stage(f"stage{stage}", forward, theta, [], home, fetched=fetched))
            options = Options(remat="none", loop=loop)
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=options)
        return loss, tape.gradient(loss, weights)

    with slow_links(links, case, schedule.stage_devices):
        compiled = step.get_concrete_function()
    return compiled, simulate(schedule, costs)


def hidden(longer: float, timeline: Timeline) -> float:
    """The share of the busiest link's time that does not lengthen the step."""
    busy = [0.0] * PLACES
    for each in timeline.link_spans:
        busy[each.device] += each.end - each.start
    # Round-off is no share.
    return round(1 - longer / max(busy), 6) + 0.0


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """For each case and form, one row of the result."""
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    # As many threads more as links wait.
    start_cpu_devices(PLACES * REPLICAS + PLACES)
    for name in CASES:
        for form, loop in FORMS.items():
            links = Links()
            step, timeline = waiting_step(name, loop, links)
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(2 * rounds + 1):
                links.slow = turn % 2 == 0
                begin = time.perf_counter()
                tf.nest.map_structure(lambda t: t.numpy(), step())
                # The first run optimizes the graph.
                if turn:
                    seconds[links.slow].append(time.perf_counter() - begin)
            longer = statistics.median(
                slow - free for slow, free in zip(seconds[True], seconds[False], strict=True)
            )
            alone = dataclasses.replace(timeline.costs, gradient_sum=0.0, all_gather=0.0)
            free = simulate(timeline.schedule, alone).makespan
            yield {
                "case": name,
                "form": form,
                "simulated": timeline.end,
                "seconds": seconds[True],
                "without": seconds[False],
                "hidden_simulated": hidden(timeline.end - free, timeline),
                "hidden": hidden(longer, timeline),
            }
