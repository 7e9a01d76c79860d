"""The speed of logical CPU devices that compute at once, for forecasts by counts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Link, Machine

Step = Callable[[], Any]


def timed(step: Step, rounds: int) -> float:
    for _ in range(2):
        step()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def on_all(mesh: Mesh, function: Callable[..., Any], *sizes: Sequence[int]) -> Step:
    """A function of tensors that each device has, on all of them at once."""
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    values = []
    for device in devices:
        with tf.device(device):
            values.append([tf.random.normal(size) for size in sizes])

    @tf.function(autograph=False)
    def step() -> Any:
        return function(devices, [tuple(of) for of in zip(*values, strict=True)])

    return step.get_concrete_function()


def each(local: Callable[..., Any]) -> Callable[..., Any]:
    def call(devices: Sequence[str], operands: Any) -> Any:
        results = []
        for at, device in enumerate(devices):
            with tf.device(device):
                results.append(local(*(x[at] for x in operands)))
        return results

    return call


def machine_of(mesh: Mesh, rounds: int) -> Machine:
    """The speed of devices that compute at once, and of a sum over the last axis."""
    size, wide, few = 512, 1 << 20, 1 << 8
    empty = timed(on_all(mesh, each(tf.identity), [1]), rounds)

    def besides(function: Callable[..., Any], *sizes: Sequence[int]) -> float:
        return max(1e-7, timed(on_all(mesh, function, *sizes), rounds) - empty)

    chain = 20

    def many(x: tf.Tensor) -> tf.Tensor:
        for _ in range(chain):
            x = tf.nn.relu(x) + 1.0
        return x

    product = besides(each(lambda a, b: tf.reduce_sum(tf.matmul(a, b))), *[[size, size]] * 2)
    call = besides(each(many), [few]) / (2 * chain)
    moved = besides(each(many), [wide]) / (2 * chain) - call
    return Machine(
        flops=2 * size**3 / product,
        bandwidth=2 * 4 * wide / max(moved, 1e-9),
        network=link_of(mesh, besides, few, wide),
        call=call,
    )


def link_of(mesh: Mesh, besides: Callable[..., float], few: int, wide: int) -> Link:
    """Returns the link between devices, by sums of few and of many numbers over the last axis."""
    axis = mesh.axis_names[-1]
    members = mesh.size(axis)
    if members == 1:
        return Link(0.0, math.inf)

    def summed(devices: Sequence[str], operands: Any) -> Any:
        lowering = PlacementLowering(mesh, LayoutRules(), devices)
        return lowering.raw_all_reduce(operands[0], [axis], "sum")

    small, large = (besides(summed, [number]) for number in (few, wide))
    steps = 2 * math.ceil(math.log2(members))
    sent = 2 * 4 * wide * (members - 1) / members
    return Link(small / steps, sent / max(large - small, 1e-9))
