"""Saving and restoring against `tf.train.Checkpoint`, and what training waits for."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from pipemesh.checkpoint import Checkpoints, restore

OURS, THEIRS = "Checkpoints", "tf.train.Checkpoint"
# Training waits for at most so much of the time that saving takes.
BAR_STALL = 0.02


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def make_step(variables: list[tf.Variable], products: int) -> Callable[[], object]:
    """A step of training: products of matrices, then every variable moves."""
    x = tf.random.stateless_normal([1024, 1024], [1, 2])

    @tf.function
    def step() -> tf.Tensor:
        y = x
        for _ in range(products):
            y = tf.nn.l2_normalize(y @ x)
        for variable in variables:
            variable.assign_add(tf.fill(variable.shape, y[0, 0]))
        return y[0, 0]

    return lambda: step().numpy()


def compare(variables: list[tf.Variable], folder: str, rounds: int) -> dict[str, float]:
    """Median seconds of saving and restoring, in turn; each round into files of its own."""
    tracked = {f"w{i}/var": v for i, v in enumerate(variables)}
    theirs = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in tracked.items()})
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        own = os.path.join(folder, f"ours-{number}")
        other = os.path.join(folder, f"theirs-{number}", "ckpt")
        os.makedirs(own)
        saver = Checkpoints(own, tracked, keep=3)
        paths: dict[str, str] = {}

        def save_ours(saver: Checkpoints = saver, paths: dict[str, str] = paths) -> None:
            paths[OURS] = saver.save(1, {})

        def save_theirs(other: str = other, paths: dict[str, str] = paths) -> None:
            paths[THEIRS] = theirs.write(other)

        turns = [(OURS, save_ours), (THEIRS, save_theirs)]
        for name, work in turns if number % 2 else turns[::-1]:
            found.setdefault(f"save, {name}", []).append(seconds(work))
        turns = [
            (OURS, lambda paths=paths: restore(paths[OURS], tracked)),
            (THEIRS, lambda paths=paths: theirs.read(paths[THEIRS]).assert_consumed()),
        ]
        for name, work in turns if number % 2 else turns[::-1]:
            found.setdefault(f"restore, {name}", []).append(seconds(work))
        shutil.rmtree(own)
        shutil.rmtree(os.path.dirname(other))
    return {
        **{name: statistics.median(values) for name, values in found.items()},
        **{
            f"{what}, {THEIRS} / {OURS}": statistics.median(
                b / a
                for a, b in zip(found[f"{what}, {OURS}"], found[f"{what}, {THEIRS}"], strict=True)
            )
            for what in ("save", "restore")
        },
    }


def stalls(
    variables: list[tf.Variable], folder: str, rounds: int, products: int
) -> dict[str, float]:
    """What a training that saves waits for, as a share of the time that saving takes."""
    step = make_step(variables, products)
    step()
    tracked = {f"w{i}/var": v for i, v in enumerate(variables)}
    saver = Checkpoints(folder, tracked, keep=1)
    alone = statistics.median(seconds(step) for _ in range(5))
    waited, written, slower = [], [], []
    for number in range(rounds):
        begin = time.perf_counter()
        waited.append(seconds(lambda number=number: saver.begin(number, {})))
        saver.confirm()
        steps = 0
        while saver.is_writing:
            step()
            steps += 1
        written.append(time.perf_counter() - begin)
        slower.append(written[-1] - waited[-1] - steps * alone)
        saver.wait()
    return {
        "a step alone": alone,
        "written beside training": statistics.median(written),
        "begin": statistics.median(waited),
        "begin / written": statistics.median(a / b for a, b in zip(waited, written, strict=True)),
        "steps slower by, in all / written": statistics.median(
            a / b for a, b in zip(slower, written, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--variables", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--products", type=int, default=10, help="of matrices in a step")
    parser.add_argument("--folder", help="where to write; default: a temporary one")
    parser.add_argument("--out", help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    size = arguments.megabytes * 1_000_000 // 4 // arguments.variables
    variables = [
        tf.Variable(tf.random.stateless_normal([size], [i, 1])) for i in range(arguments.variables)
    ]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = compare(variables, folder, arguments.rounds)
        found |= stalls(variables, folder, arguments.rounds, arguments.products)
    print(f"{arguments.variables} variables, {arguments.megabytes} MB, {arguments.rounds} rounds")
    for name, value in found.items():
        unit = "" if "/" in name else " s"
        print(f"{name:38} {value:8.4f}{unit}")
    for what in ("save", "restore"):
        faster = found[f"{what}, {THEIRS} / {OURS}"]
        print(f"{what}: {faster:.2f} times as fast (bar 1: {'met' if faster >= 1 else 'NOT met'})")
    share = found["begin / written"]
    print(
        f"training waits for {share:.2%} of the time (bar {BAR_STALL:.0%}: "
        f"{'met' if share <= BAR_STALL else 'NOT met'})"
    )
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
