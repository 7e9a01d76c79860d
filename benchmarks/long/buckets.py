"""Documents of different lengths: tokens a second with and without batches in buckets of length.

    python benchmarks/long/buckets.py

The model of `run.py` trains in two stages on documents of 32 to 1,024 tokens, as many of each power
of two, each in a row for itself. Contenders compute the same batches of their mixtures in turn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import run as long
from shared.stack import quiet, set_threads

LENGTH, ROWS = 1024, 8
BUCKETS = {"one length": "", "buckets": "128,256,512"}


def batches_of(folder: str, buckets: str, number: int) -> list[dict[str, Any]]:
    """Returns the first batches of a mixture of the documents."""
    import numpy as np

    from pipemesh.data import DocumentBatches

    path, rng = pathlib.Path(folder) / "documents.jsonl", np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(5, 10, 2000)).astype(int)
    lines = (json.dumps({"ids": rng.integers(1, long.VOCAB, n).tolist()}) for n in sizes)
    path.write_text("\n".join(lines))
    data = DocumentBatches(
        str(path), lambda: (None, long.VOCAB), LENGTH, ROWS, "single", seed=0, buckets=buckets
    )
    return list(data().take(number))


def main() -> None:
    """Prints a row for each contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40, help="batches of each contender")
    arguments = parser.parse_args()
    quiet()
    set_threads(inter_op=2, intra_op=1, num_devices=2)
    import tensorflow as tf
    from lingvo.core import py_utils

    from pipemesh.layers import mesh_cluster

    plan, params = long.params_of(long.Case("layers:2", rows=ROWS), LENGTH)
    py_utils.SetEagerMode(True)
    tf.random.set_seed(1)
    with mesh_cluster(plan.mesh):
        py_utils.GetOrCreateGlobalStepVar()
        stack = params.Instantiate()
    weights = stack.vars.Flatten()

    @tf.function(autograph=False)
    def step(batch: Any) -> Any:
        row = [batch[name] for name in ("ids", "labels", "weights", "segment_ids", "segment_pos")]
        with tf.GradientTape() as tape:
            total, count, *_ = stack.FPropDefaultTheta(*row)
        return total, count, tape.gradient(total / count, weights)

    with tempfile.TemporaryDirectory() as folder:
        known = {
            name: batches_of(folder, buckets, arguments.batches)
            for name, buckets in BUCKETS.items()
        }
    seconds: dict[str, list[float]] = {name: [] for name in known}
    with mesh_cluster(plan.mesh):
        # The first step of each length builds its graph.
        for batches in known.values():
            for batch in {batch["ids"].shape[1]: batch for batch in batches}.values():
                step(batch)
        for turn in zip(*known.values(), strict=True):
            for name, batch in zip(known, turn, strict=True):
                begin = time.perf_counter()
                step(batch)[0].numpy()
                seconds[name].append(time.perf_counter() - begin)
    print("| | tokens/s | padding | median step |")
    print("|---|--:|--:|--:|")
    for name, batches in known.items():
        real = sum(int(tf.math.count_nonzero(batch["segment_ids"])) for batch in batches)
        places = sum(int(tf.size(batch["ids"])) for batch in batches)
        print(
            f"| {name} | {real / sum(seconds[name]):,.0f} | {1 - real / places:.0%} "
            f"| {1e3 * statistics.median(seconds[name]):.0f} ms |"
        )


if __name__ == "__main__":
    main()
