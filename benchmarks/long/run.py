"""Long sequences: memory of each device and tokens a second, where an axis splits sequences.

    python benchmarks/long/run.py

A small language model trains on one row of tokens, on one device and under the rule `length:cp` on
two and four. Every measurement is a fresh process.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import ROOT, Contender, serve_timed
from shared.resident import FREED_AT_ONCE, resident

sys.path.insert(0, str(ROOT))

WIDTH, HEADS, HIDDEN, VOCAB, BLOCKS = 64, 4, 256, 256, 2
LENGTHS = [1024 * 2**n for n in range(6)]
# Devices that split each row, and what their attention exchanges.
PLANS = {"cp:1": (1, None), "cp:2": (2, None), "cp:4": (4, None), "cp:4, ring": (4, "ring")}
MIB = 2**20
# What a process answers with beside its times.
VALUES = ["loss", "peak", "closed", "traced", "forecast"]
# How far the closed form may be from what a device keeps.
BAR = 0.05


def params_of(members: int, split_by: str | None, length: int) -> tuple[Any, Any]:
    """Returns the plan, and params of the stack: the language model's, in one stage."""
    from models.one_billion_word.params import OneBillionWordTiny
    from pipemesh.plan import Plan

    config = OneBillionWordTiny()
    settings = {"VOCAB_SIZE": VOCAB, "MODEL_DIM": WIDTH, "HIDDEN_DIM": HIDDEN, "NUM_HEADS": HEADS}
    settings |= {"NUM_LAYERS": BLOCKS, "SEQUENCE_LENGTH": length, "BATCH_SIZE": 1}
    config.PLAN = Plan(f"layers:1;cp:{members}", "length:cp", remat="none")
    for name, value in settings.items():
        setattr(config, name, value)
    stack = config.Task().stack.Set(name="stack")
    for layer in stack.cell_tpl[0].sub[1:-1]:
        layer.attention_tpl.split_length_by = split_by
    return config.PLAN, stack


def forecast(layers: list[Any], mesh: Any, rules: Any, length: int) -> tuple[float, float]:
    """Returns the bytes that a device keeps of a row, and the seconds of a step, by formulas."""
    from lingvo.core import tshape
    from shared.speeds import machine_of

    from pipemesh.layers.layout_pricing import counted, layers_pricing

    shapes = [tshape.Shape([1, length])] * 5
    kept = sum(meta.activation_bytes for meta in counted(layers, shapes, mesh, rules))
    price = layers_pricing(mesh, layers, machine_of(mesh, 5), *shapes).price(rules)
    return kept / mesh.num_devices, price.seconds


def make_step(name: str, length: int):
    """A step with all gradients, which returns loss and memory; and the forecast before it."""
    from shared.stack import quiet, set_threads

    quiet()
    members, split_by = PLANS[name]
    set_threads(inter_op=members, intra_op=1, num_devices=members)
    import numpy as np
    import tensorflow as tf
    from lingvo.core import py_utils

    from pipemesh.layers import mesh_cluster

    plan, params = params_of(members, split_by, length)
    layers = params.cell_tpl[0].sub
    closed, forecast_seconds = forecast(layers, plan.mesh.without("layers"), plan.layout, length)
    py_utils.SetEagerMode(True)
    tf.random.set_seed(1)
    with mesh_cluster(plan.mesh, layout=plan.layout):
        py_utils.GetOrCreateGlobalStepVar()
        stack = params.Instantiate()
        rng = np.random.default_rng(0)
        ids = rng.integers(1, VOCAB, [1, length + 1]).astype(np.int32)
        ones, places = np.ones([1, length]), np.arange(length)[None]
        row = [ids[:, :-1], ids[:, 1:], ones.astype(np.float32), ones.astype(np.int32)]
        row = [tf.constant(each) for each in (*row, places.astype(np.int32))]
        traced = max(device.kept for device in stack.PredictMemory(*row))
    weights = stack.vars.Flatten()

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            total, count, *_ = stack.FPropDefaultTheta(*row)
            loss = total / count
        return loss, tape.gradient(loss, weights)

    with mesh_cluster(plan.mesh, layout=plan.layout):
        step = step.get_concrete_function()
    before = resident()["VmRSS"]

    def run() -> tuple[float, ...]:
        loss, _ = step()
        return float(loss), resident()["VmHWM"] - before, closed, traced, forecast_seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if arguments.serve:
        serve_timed(make_step(arguments.serve[0], int(arguments.serve[1])))
        return
    if "VmHWM" not in resident():
        raise SystemExit("this system does not say how much memory a process holds")
    results = []
    print(" ".join(f"{head:>{len(head)}}" for head in COLUMNS))
    for length in arguments.lengths:
        rows = [
            {"length": length, "plan": name, **measure(name, length, arguments.rounds)}
            for name in arguments.plans
        ]
        losses = [row["loss"] for row in rows]
        if max(losses) - min(losses) > 1e-4 * losses[0]:
            raise SystemExit(f"the plans do not compute the same: losses {losses}")
        for row in rows:
            print_row(row)
        results += rows
    worst = max(abs(row["closed"] / row["traced"] - 1) for row in results)
    verdict = "met" if worst <= BAR else "NOT met"
    print(f"closed form against the graph: {worst:.1%} apart at most (bar {BAR:.0%}: {verdict})")
    pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


COLUMNS = ["tokens", "plan      ", "kept MiB", "closed form", "peak MiB", "tokens/s", "forecast"]


def print_row(row: dict[str, Any]) -> None:
    """Prints what a device keeps, the closed form of it over that, and tokens a second."""
    members = PLANS[row["plan"]][0]
    cells = [
        f"{row['length']:,}",
        row["plan"],
        f"{row['traced'] / MIB:.1f}",
        f"{row['closed'] / row['traced']:.3f}",
        f"{row['peak'] / members / MIB:.1f}",
        f"{row['length'] / row['seconds']:,.0f}",
        f"{row['length'] / row['forecast']:,.0f}",
    ]
    print(" ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, COLUMNS, strict=True)))


def measure(name: str, length: int, rounds: int) -> dict[str, float]:
    """Runs steps in a fresh process; the first one, which warms up, is not timed."""
    command = [sys.executable, __file__, "--serve", name, str(length)]
    contender = Contender(command, FREED_AT_ONCE)
    found = [contender.ask() for _ in range(rounds + 1)]
    contender.close()
    _, _, *values = found[-1]
    seconds = statistics.median(wall for wall, *_ in found[1:])
    return {"seconds": seconds, **dict(zip(VALUES, values, strict=True))}


if __name__ == "__main__":
    main()
