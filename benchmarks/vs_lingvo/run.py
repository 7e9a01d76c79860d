"""One training step of one stack: pipemesh, lingvo's PipeliningLayer, and the plain model.

    python benchmarks/vs_lingvo/run.py

Each contender has a process of its own, because threads are set once a process. They compute in
turn, one step each a round, while the others wait.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import Contender, serve_timed, take_turns
from shared.stack import (
    Stack,
    initial_weight,
    lingvo_step,
    quiet,
    set_threads,
    sum_of_squares,
    tf2_step,
)

STACK = Stack(rows=2048, dim=512, hidden=2048, blocks=8, stages=2, microbatches=8)
CONTENDERS = {
    "pipemesh, looped": "tf2 pipelined, 1 intra-op thread a device, 2 stages a device, remat none",
    "pipemesh, remat none": "tf2 pipelined, 1 intra-op thread a stage",
    "pipemesh, remat full": "tf2 pipelined, 1 intra-op thread a stage",
    "lingvo": "lingvo.core.gpipe.PipeliningLayer, tf1, 1 intra-op thread a stage",
    "plain": "tf2, one device, both cores",
    "products alone": "the products of matrices of a step, one thread a stage, nothing else",
}
BEST, PRODUCTS = "pipemesh, looped", "products alone"
BARS = {"lingvo": 0.55, "plain": 0.9}


def make_step(name: str):
    quiet()
    if name == "lingvo":
        return lingvo_step(STACK, inter_op=4)
    if name == PRODUCTS:
        return products_step()
    if name == "plain":
        set_threads(inter_op=2, intra_op=2, num_devices=1)
        from pipemesh.layers import FeatureExtractionLayer

        def make_params():
            return FeatureExtractionLayer.Params().Set(name="plain", sub=STACK.layers())

        return tf2_step(make_params, STACK, 1, sum_of_squares)
    set_threads(inter_op=STACK.stages, intra_op=1, num_devices=STACK.stages)
    import pipemesh.layers

    def make_params():
        if name == BEST:
            # Half as long a wait for the first microbatch, and the loss may be outside as well.
            looped = dataclasses.replace(STACK, stages=2 * STACK.stages)
            return looped.pipeline(pipemesh.layers, schedule="looped_bfs:2", remat="none")
        return STACK.pipeline(pipemesh.layers, remat=name.split()[-1])

    return tf2_step(make_params, STACK, STACK.stages, sum_of_squares)


def products_step():
    """What no schedule can save: each stage's products on its device, all at the same time."""
    set_threads(inter_op=STACK.stages, intra_op=1, num_devices=STACK.stages)
    import tensorflow as tf

    rows = STACK.rows // STACK.microbatches
    shapes = {"w1": [STACK.dim, STACK.hidden], "w2": [STACK.hidden, STACK.dim]}
    share = STACK.blocks // STACK.stages

    def microbatch(blocks, x, total):
        for block in blocks:
            w1, w2 = (tf.constant(initial_weight(f"block{block}/{w}", shapes[w])) for w in shapes)
            inner = tf.matmul(x, w1)
            y = tf.matmul(inner, w2)
            dinner = tf.matmul(y, w2, transpose_b=True)
            found = [y, tf.matmul(x, dinner, transpose_a=True)]
            found.append(tf.matmul(inner, y, transpose_a=True))
            if block:
                found.append(tf.matmul(dinner, w1, transpose_b=True))
            # One element keeps TensorFlow from leaving a product out.
            total += tf.add_n([product[0, 0] for product in found])
        return total

    @tf.function(autograph=False)
    def step(x):
        totals = []
        for stage in range(STACK.stages):
            blocks = range(stage * share, (stage + 1) * share)
            with tf.device(f"CPU:{stage}"):
                totals += tf.while_loop(
                    lambda m, _: m < STACK.microbatches,
                    # Another input each time keeps TensorFlow from computing all only once.
                    lambda m, total, blocks=blocks: (
                        m + 1,
                        microbatch(blocks, x + tf.cast(m, x.dtype), total),
                    ),
                    (tf.constant(0), tf.constant(0.0)),
                    parallel_iterations=1,
                )[1:]
        return totals

    x = tf.constant(STACK.batch()[:rows])
    return lambda: tuple(float(total) for total in step(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if arguments.serve:
        serve_timed(make_step(arguments.serve))
        return
    contenders = {
        name: Contender([sys.executable, __file__, "--serve", name]) for name in CONTENDERS
    }
    seconds, cpu_seconds, _ = take_turns(contenders, arguments.rounds, "plain", [PRODUCTS])
    report(seconds, cpu_seconds, arguments)


def report(seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]], arguments) -> None:
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{STACK}; {arguments.rounds} rounds in turn")
    print(f"{'':22} {'median':>8} {'quartiles':>17} {'/ lingvo':>9} {'/ plain':>8} {'CPU':>8}")
    for name, times in seconds.items():
        low, _, high = statistics.quantiles(times, n=4)
        print(
            f"{name:22} {1e3 * median[name]:6.0f}ms {1e3 * low:7.0f} -{1e3 * high:6.0f}ms "
            f"{median[name] / median['lingvo']:9.2f} {median[name] / median['plain']:8.2f} "
            f"{1e3 * statistics.median(cpu_seconds[name]):6.0f}ms"
        )
    # Each round's steps ran one right after the other, so their ratio suffers least from what
    # else the machine does.
    paired = {}
    for peer, bar in BARS.items():
        paired[peer] = statistics.median(
            mine / theirs for mine, theirs in zip(seconds[BEST], seconds[peer], strict=True)
        )
        verdict = "met" if paired[peer] <= bar else "NOT met"
        print(f"{BEST} / {peer}, median over rounds: {paired[peer]:.2f} (bar {bar}: {verdict})")
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "contenders": CONTENDERS,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "median": median,
        "paired_ratio": paired,
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
