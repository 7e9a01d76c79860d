"""Long sequences: memory of each device and tokens a second, under plans that split sequences.

    python benchmarks/long/run.py

A small language model trains on one row of tokens, on one device and under the rule `length:cp` on
two and four; and in two stages on four rows, each a microbatch, whole or in slices of equal length
or of equal work. Every measurement is a fresh process.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import ROOT, Contender, serve_timed
from shared.resident import FREED_AT_ONCE, resident

sys.path.insert(0, str(ROOT))

from pipemesh.mesh import Mesh

WIDTH, HEADS, HIDDEN, VOCAB, BLOCKS = 64, 4, 256, 256, 2
LENGTHS = [1024 * 2**n for n in range(6)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, the rows of its batch, and what attention exchanges if rows are split."""

    mesh: str
    rows: int = 1
    schedule: str = "1f1b"
    exchanges: str | None = None

    @property
    def devices(self) -> int:
        """Returns the number of devices."""
        return Mesh.from_text(self.mesh).num_devices


CP, STAGES = "layers:1;cp:", Case("layers:2", rows=4)
PLANS = {
    "cp:1": Case(f"{CP}1"),
    "cp:2": Case(f"{CP}2"),
    "cp:4": Case(f"{CP}4"),
    "cp:4, ring": Case(f"{CP}4", exchanges="ring"),
    "1f1b": STAGES,
    "seq1f1b:2": dataclasses.replace(STAGES, schedule="seq1f1b:2"),
    "seq1f1b:2:equal_work": dataclasses.replace(STAGES, schedule="seq1f1b:2:equal_work"),
    "seq1f1b:4": dataclasses.replace(STAGES, schedule="seq1f1b:4"),
    "seq1f1b:4:equal_work": dataclasses.replace(STAGES, schedule="seq1f1b:4:equal_work"),
}
MIB = 2**20
# What a process answers with beside its times.
VALUES = ["loss", "peak", "closed", "traced", "forecast", "makespan"]
# How far the closed form may be from what a device keeps.
BAR = 0.05


def params_of(case: Case, length: int) -> tuple[Any, Any]:
    """Returns the plan, and params of the stack: the language model's."""
    from models.one_billion_word.params import OneBillionWordTiny
    from pipemesh.plan import Plan

    config = OneBillionWordTiny()
    settings = {"VOCAB_SIZE": VOCAB, "MODEL_DIM": WIDTH, "HIDDEN_DIM": HIDDEN, "NUM_HEADS": HEADS}
    settings |= {"NUM_LAYERS": BLOCKS, "SEQUENCE_LENGTH": length, "BATCH_SIZE": case.rows}
    layout = "length:cp" if "cp" in case.mesh else ""
    config.PLAN = Plan(case.mesh, layout, case.schedule, case.rows, remat="none")
    for name, value in settings.items():
        setattr(config, name, value)
    stack = config.Task().stack.Set(name="stack")
    for stage in stack.cell_tpl:
        for layer in stage.sub:
            if "attention_tpl" in layer:
                layer.attention_tpl.split_length_by = case.exchanges
    return config.PLAN, stack


def forecast(
    plan: Any, layers: list[Any], cuts: list[int], length: int
) -> tuple[float, float, float]:
    """Returns what formulas say of a step: the bytes that the fullest device keeps, the seconds,
    and the seconds over those of the same work spread evenly over the devices.
    """
    from lingvo.core import tshape
    from shared.speeds import machine_of

    from pipemesh.layers.layout_pricing import counted, layers_pricing
    from pipemesh.layers.pipeline.slices import row_work
    from pipemesh.partition import LayerCost
    from pipemesh.plan import Figures, predict
    from pipemesh.plan.figures import figures_of_costs
    from pipemesh.plan.stages import stages_of

    every = Mesh.from_text(f"cp:{plan.mesh.num_devices}")
    mesh = every if plan.num_stages == 1 else Mesh.from_text("cp:1")
    shapes = [tshape.Shape([1, length])] * 5
    metas = counted(layers, shapes, mesh, plan.layout)
    # Of one row, on a device.
    kept = [meta.activation_bytes / mesh.num_devices for meta in metas]
    machine = machine_of(every, 5)
    seconds = layers_pricing(mesh, layers, machine, *shapes).price(plan.layout).seconds
    if plan.num_stages == 1:
        return sum(kept), seconds, 1.0
    flops = sum(meta.flops for meta in metas)
    mesh_size = plan.mesh.num_devices
    costs = [LayerCost(seconds * meta.flops / flops / 3) for meta in metas]
    work = row_work("the stack", layers, shapes)
    members = [
        dataclasses.replace(layer, row_work=tuple(parts))
        for layer, parts in zip(figures_of_costs(costs, rows=1), work, strict=True)
    ]
    figures = Figures(tuple(members), positions=length)
    plan = dataclasses.replace(plan, boundaries=tuple(cuts))
    step = predict(plan, figures, plan.num_microbatches, parts=False)
    stages = stages_of(plan, figures, plan.num_microbatches)
    most = 0.0
    for stage, row in enumerate(stages.table.rows):
        held = peak = 0.0
        for action in row:
            rows = stages.slice_rows(action.microbatch)
            held += rows if action.kind == "F" else -rows
            peak = max(peak, held)
        most = max(most, peak * sum(kept[cuts[stage] : cuts[stage + 1]]))
    return most, step.seconds, step.seconds * mesh_size / (plan.num_microbatches * seconds)


def make_step(name: str, length: int):
    """A step with all gradients, which returns loss and memory; and the forecast before it."""
    from shared.stack import quiet, set_threads

    quiet()
    case = PLANS[name]
    members = case.devices
    set_threads(inter_op=members, intra_op=1, num_devices=members)
    import numpy as np
    import tensorflow as tf
    from lingvo.core import py_utils

    from pipemesh.layers import mesh_cluster

    plan, params = params_of(case, length)
    layers = [layer for stage in params.cell_tpl for layer in stage.sub]
    cuts = [0, *itertools.accumulate(len(stage.sub) for stage in params.cell_tpl)]
    closed, *forecast_of_step = forecast(plan, layers, cuts, length)
    py_utils.SetEagerMode(True)
    tf.random.set_seed(1)
    with mesh_cluster(plan.mesh, layout=plan.layout):
        py_utils.GetOrCreateGlobalStepVar()
        stack = params.Instantiate()
        rng = np.random.default_rng(0)
        ids = rng.integers(1, VOCAB, [case.rows, length + 1]).astype(np.int32)
        ones, places = np.ones([case.rows, length]), np.tile(np.arange(length), [case.rows, 1])
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
        return float(loss), resident()["VmHWM"] - before, closed, traced, *forecast_of_step

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
        for number in {PLANS[name].rows for name in arguments.plans}:
            losses = [row["loss"] for row in rows if PLANS[row["plan"]].rows == number]
            if max(losses) - min(losses) > 1e-4 * losses[0]:
                raise SystemExit(f"the plans do not compute the same: losses {losses}")
        for row in rows:
            print_row(row)
        results += rows
    worst = max(abs(row["closed"] / row["traced"] - 1) for row in results)
    verdict = "met" if worst <= BAR else "NOT met"
    print(f"closed form against the graph: {worst:.1%} apart at most (bar {BAR:.0%}: {verdict})")
    pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


COLUMNS = [
    "tokens",
    "plan                ",
    "kept MiB",
    "closed form",
    "peak MiB",
    "tokens/s",
    "forecast",
    "makespan",
]


def print_row(row: dict[str, Any]) -> None:
    """Prints what a device keeps, the closed form of it over that, and tokens a second."""
    case = PLANS[row["plan"]]
    tokens = case.rows * row["length"]
    cells = [
        f"{row['length']:,}",
        row["plan"],
        f"{row['traced'] / MIB:.1f}",
        f"{row['closed'] / row['traced']:.3f}",
        f"{row['peak'] / case.devices / MIB:.1f}",
        f"{tokens / row['seconds']:,.0f}",
        f"{tokens / row['forecast']:,.0f}",
        f"{row['makespan']:.3f}",
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
