"""Seconds to the first step of alike stages, with and without XLA, each case in a process.

python benchmarks/first_step/alike_stages.py --rounds=3
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import Contender, serve
from shared.stack import quiet, set_threads, sum_of_squares, tf2_step

DIM, HIDDEN, LENGTH, ROWS, MICROBATCHES = 64, 256, 32, 4, 2
# Stages, and the devices that they are on.
CASES = {"1 stage": (1, 1), "8 stages on 1 device": (8, 1), "8 stages on 8 devices": (8, 8)}
BAR = 1.5


class _Rows:
    """The input of the stack."""

    def batch(self) -> np.ndarray:
        shape = (ROWS, LENGTH, DIM)
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def measure(num_stages: int, num_devices: int, compile: bool) -> list[float]:
    """Seconds until the first step has ended, and of the fastest of three later ones."""
    quiet()
    set_threads(2, 1, num_devices)
    from pipemesh.backend.devices import prepare_graphs_quickly
    from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer
    from pipemesh.layers.named import TransformerBlock

    prepare_graphs_quickly()

    def params() -> Any:
        cells = [
            FeatureExtractionLayer.Params().Set(
                name=f"stage{number}",
                sub=[
                    TransformerBlock.Params().Set(
                        name=f"block{number}",
                        input_dim=DIM,
                        hidden_dim=HIDDEN,
                        num_heads=4,
                        dropout_rate=0.1,
                    )
                ],
            )
            for number in range(num_stages)
        ]
        return PipeliningLayer.Params().Set(
            name="stack",
            cell_tpl=cells,
            num_micro_batches=MICROBATCHES,
            schedule=f"looped_bfs:{num_stages}" if num_devices < num_stages else "gpipe",
            compile=compile,
            loop=False,
        )

    begin = time.perf_counter()
    rows: Any = _Rows()
    run = tf2_step(params, rows, num_devices, sum_of_squares)
    seconds = []
    for _ in range(4):
        run()
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return [seconds[0], min(seconds[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        case, compiles = json.loads(arguments.serve)
        serve(lambda: measure(*CASES[case], compiles))
        return
    found: dict[tuple[str, bool], list[list[float]]] = {}
    for _ in range(arguments.rounds):
        for case in CASES:
            for compiles in (False, True):
                given = json.dumps([case, compiles])
                process = Contender([sys.executable, __file__, "--serve", given])
                found.setdefault((case, compiles), []).append(process.ask())
                process.close()
    one = {
        compiles: statistics.median(first for first, _ in found["1 stage", compiles])
        for compiles in (False, True)
    }
    print("| stages | | to the end of the first step | of one stage | later steps |")
    print("|---|---|---|---|---|")
    for (case, compiles), pairs in found.items():
        first, later = map(statistics.median, zip(*pairs, strict=True))
        form = "compiled" if compiles else "operations"
        ratio = f"{first / one[compiles]:.2f}"
        print(f"| {case} | {form} | {first:.1f} s | {ratio} | {1e3 * later:.0f} ms |")
    print(f"bar: {BAR} of one stage, compiled")


if __name__ == "__main__":
    main()
