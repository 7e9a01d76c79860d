"""Stages and links that wait: how much of the sums of gradients hides behind other stages.

Each stage has two replicas, on two devices. A link waits in place of the sum of a stage's
gradients, one sum after the other. The same compiled step runs in turn with links that wait and
with links that do not, so what is left of the sums at the end of a step can be held against
`Timeline.sums`.
"""

from __future__ import annotations

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
BAR = 0.05  # The most that the hidden share is off the simulated one.
# By name: the schedule, its stages a device, and whether the last stage has most of the weights, as
# a language model's has with its vocabulary.
CASES = {
    "one_f_one_b": ("one_f_one_b", 1, False),
    "one_f_one_b, large last stage": ("one_f_one_b", 1, True),
    "zb_h1, large last stage": ("zb_h1", 1, True),
    "interleaved_one_f_one_b": ("interleaved_one_f_one_b", 2, False),
    "looped_bfs": ("looped_bfs", 2, False),
    "zb_v": ("zb_v", 2, False),
}
FORMS = {"actions": False, "loop": True}


class Links:
    """Links that wait in place of sums, each for one sum at a time.

    Attributes:
        slow: whether they wait at all.
    """

    def __init__(self) -> None:
        self.slow = False
        self._locks = [threading.Lock() for _ in range(PLACES)]

    def sum_by(self, seconds: Callable[[], float], place: int) -> Callable[[Sequence[Any]], Any]:
        """A function that sums tensors as the executor does, on a link that waits."""
        import tensorflow as tf

        def wait(*parts: Any) -> Any:
            if self.slow:
                with self._locks[place]:
                    time.sleep(seconds())
            return np.sum(parts, axis=0, dtype=np.float32)

        def summed(parts: Sequence[Any]) -> Any:
            total = tf.numpy_function(wait, parts, tf.float32, stateful=False)
            total.set_shape(parts[0].shape)
            return total

        return summed


def waiting_step(name: str, loop: bool, links: Links) -> tuple[Callable[[], Any], Timeline]:
    """The compiled step of a case, and its simulation."""
    import tensorflow as tf

    from pipemesh.recurrent import Home, Options, Stage, pipeline_loss
    from pipemesh.recurrent.table import machine

    builder, share, has_large_end = CASES[name]
    schedule = build(builder, PLACES, MICROBATCHES)
    number = schedule.num_stages
    splits = any(action.kind == "W" for row in schedule.rows for action in row)
    sums = [SUM / share] * number
    if has_large_end:
        sums = [SUM / 8] * (number - 1) + [SUM]
    costs = Costs(FORWARD / share, BACKWARD / share, gradient_sum=sums)
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
    own_sum, own_total = machine.sum_in_order, machine.Machine.total_gradients

    def on_link(self: Any, stage: int, state: Any) -> Any:
        machine.sum_in_order = links.sum_by(lambda: sums[stage], schedule.stage_devices[stage])
        try:
            return own_total(self, stage, state)
        finally:
            machine.sum_in_order = own_sum

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            stages = []
            for stage in range(number):
                first = REPLICAS * schedule.stage_devices[stage]
                home = Home(tuple(f"CPU:{first + replica}" for replica in range(REPLICAS)))
                theta = [tf.convert_to_tensor(weights[stage])]
                stages.append(Stage(f"stage{stage}", forward_of(stage), theta, [], home))
            options = Options(remat="none", loop=loop)
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=options)
        return loss, tape.gradient(loss, weights)

    machine.Machine.total_gradients = on_link
    try:
        compiled = step.get_concrete_function()
    finally:
        machine.Machine.total_gradients = own_total
    return compiled, simulate(schedule, costs)


def hidden(after: float, timeline: Timeline) -> float:
    """The share of the busiest link's sums that does not lengthen the step."""
    busy = [0.0] * PLACES
    for each in timeline.sums:
        busy[each.device] += each.end - each.start
    return 1 - after / max(busy)


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
            after = statistics.median(
                slow - free for slow, free in zip(seconds[True], seconds[False], strict=True)
            )
            yield {
                "case": name,
                "form": form,
                "simulated": timeline.end,
                "seconds": seconds[True],
                "without": seconds[False],
                "hidden_simulated": hidden(timeline.end - timeline.makespan, timeline),
                "hidden": hidden(after, timeline),
            }
