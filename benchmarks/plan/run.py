"""How far forecasts of plans are from steps of real computation, on plans that were not fitted.

    python benchmarks/plan/run.py --family=language --plans=50
    python benchmarks/plan/run.py --family=dense --plans=50
    python benchmarks/plan/run.py --report

Each call measures the family once (or takes --figures), and then so many plans that the results do
not have yet; it may be ended at any time. Every plan is timed in turn with a plain step: one
device, one microbatch, without remat. What it took when the family was measured is in the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipemesh.plan import Asked, Figures, Plan, predict, search
from pipemesh.plan.candidates import rated
from pipemesh.plan.figures import PLAIN
from pipemesh.plan.search import TRIALS
from pipemesh.text import columns

HERE = pathlib.Path(__file__).resolve().parent
# The models of this project, which are not installed with the library.
sys.path.insert(0, str(HERE.parents[1]))
DEVICES, MOST_MICROBATCHES, ROUNDS = 4, 8, 15
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "interleaved:2", "zb_v")
BARS = {"mean": 0.05, "p95": 0.12, "tau": 0.9, "regret": 0.03, "under": 0.02, "search": 10.0}


def started(family: str) -> tuple[Callable[[Plan], Any], Any]:
    """TensorFlow with its devices; the family's model under a plan, and a batch."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from absl import flags, logging

    from pipemesh.layers import lingvo_loader as _  # noqa: F401

    logging.set_verbosity(logging.ERROR)
    flags.FLAGS.mark_as_parsed()
    from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices

    prepare_graphs_quickly()
    start_cpu_devices(DEVICES)
    from families import FAMILIES
    from lingvo.core import py_utils

    from pipemesh.training.registered import RegisteredModel

    py_utils.SetEagerMode(True)

    def make(plan: Plan) -> Any:
        return RegisteredModel(FAMILIES[family](), family, plan.to_values())

    return make, next(iter(make(Plan()).train_data(0)))


def plans_of(figures: Figures, seed: int) -> list[Plan]:
    """All plans of the search that can be built here, in an order that a seed draws."""
    from pipemesh.training.measuring.measure import plans_to_fit

    asked = Asked(DEVICES, figures.batch, schedules=SCHEDULES)
    fitted = {_uncut(plan) for plan in (*plans_to_fit(figures, DEVICES), PLAIN)}
    found: dict[str, Plan] = {}
    for candidate in rated(figures, asked):
        plan = candidate.plan(figures, asked)
        if plan is None or plan.num_microbatches > MOST_MICROBATCHES:
            continue
        if plan.mesh.num_devices > 1 or plan.num_microbatches > 1:
            found.setdefault(str(plan), plan)
    kept = sorted(text for text, plan in found.items() if _uncut(plan) not in fitted)
    random.Random(seed).shuffle(kept)
    return [found[text] for text in kept]


def _uncut(plan: Plan) -> str:
    """A plan whose layers are cut evenly is none of its own."""
    return str(dataclasses.replace(plan, boundaries=None))


def measured(make: Callable[[Plan], Any], batch: Any, plan: Plan, reference: Any) -> dict[str, Any]:
    """A plan's steps, each in turn with one of the reference."""
    from pipemesh.training.measuring.timed_step import TimedStep

    gc.collect()
    step = TimedStep(make(plan), batch)
    step.run()
    own: list[float] = []
    cpu: list[float] = []
    beside_cpu: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        beside.append(reference.run())
        beside_cpu.append(reference.cpu)
        own.append(step.run())
        cpu.append(step.cpu)
    return {
        "seconds": own,
        "reference": beside,
        "cpu": cpu,
        "reference_cpu": beside_cpu,
        "held": max(device.total for device in step.memory),
        "build": step.build,
    }


def run(arguments: argparse.Namespace) -> None:
    make, batch = started(arguments.family)
    from pipemesh.training.measuring.measure import measure
    from pipemesh.training.measuring.timed_step import TimedStep

    path = pathlib.Path(arguments.figures or HERE / f"{arguments.family}.json")
    if not path.exists():
        found = measure(make, batch, DEVICES, lambda text: print(f"measuring {text}", flush=True))
        path.write_text(found.to_json(), encoding="utf-8")
    figures = Figures.from_json(path.read_text(encoding="utf-8"), str(path))
    out = pathlib.Path(arguments.out)
    done = {row["plan"] for row in rows_of(out) if row["family"] == arguments.family}
    reference = TimedStep(make(PLAIN), batch)
    begin = time.perf_counter()
    left = [plan for plan in plans_of(figures, arguments.seed) if str(plan) not in done]
    for plan in left[: arguments.plans]:
        if arguments.minutes and time.perf_counter() - begin > 60 * arguments.minutes:
            break
        row = {"family": arguments.family, "plan": str(plan)}
        row |= measured(make, batch, plan, reference)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        ahead = predict(plan, figures, figures.batch, parts=False)
        print(
            f"{plan}: {1e3 * statistics.median(row['seconds']):.1f} ms, forecast "
            f"{1e3 * ahead.seconds:.1f} ms, built in {row['build']:.1f} s",
            flush=True,
        )


def rows_of(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau (Kendall, "A new measure of rank correlation", 1938)."""
    agree = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            pairs += 1
            product = (a[i] - a[j]) * (b[i] - b[j])
            agree += (product > 0) - (product < 0)
    return agree / pairs if pairs else 1.0


def mean_and_95th(errors: list[float]) -> tuple[str, str]:
    worst = sorted(errors)[min(len(errors) - 1, int(0.95 * len(errors)))]
    return f"{statistics.fmean(errors):.1%}", f"{worst:.1%}"


def report(arguments: argparse.Namespace) -> None:
    """Rows of a family: by the clock, by the ratio to plain steps, at pace, and what cores did."""
    table = [
        (
            "family",
            "plans",
            "mean error",
            "95th",
            "tau",
            "regret",
            f"of {TRIALS}",
            "memory under",
            "over",
            "search s",
        ),
    ]
    everything = list(rows_of(pathlib.Path(arguments.out)))
    all_errors: dict[str, list[float]] = {}
    for family in sorted({row["family"] for row in everything}):
        rows = [row for row in everything if row["family"] == family]
        path = pathlib.Path(arguments.figures or HERE / f"{family}.json")
        figures = Figures.from_json(path.read_text(encoding="utf-8"), str(path))
        plans = [Plan.from_text(row["plan"]) for row in rows]
        ahead = [predict(plan, figures, figures.batch, parts=False) for plan in plans]
        begin = time.perf_counter()
        search(figures, Asked(DEVICES, figures.batch, schedules=SCHEDULES))
        took = time.perf_counter() - begin
        # The optimizer's state is no matter of the graph.
        bare = dataclasses.replace(figures, optimizer=0.0)
        sizes = [max(predict(plan, bare, bare.batch, parts=False).memory) for plan in plans]
        held = [row["held"] / size for row, size in zip(rows, sizes, strict=True)]
        clock = [statistics.median(row["seconds"]) for row in rows]
        # What else runs on the machine makes both longer alike.
        usual = statistics.median(statistics.median(row["reference"]) for row in rows)
        ratio = [
            usual
            * statistics.median(
                own / beside for own, beside in zip(row["seconds"], row["reference"], strict=True)
            )
            for row in rows
        ]
        cores = [statistics.median(row["cpu"]) for row in rows]
        now = figures.at_pace(usual)
        later = [predict(plan, now, now.batch, parts=False) for plan in plans]
        for name, seconds, told in (
            ("clock", clock, [each.seconds for each in ahead]),
            ("in turn", ratio, [each.seconds for each in ahead]),
            ("at pace", ratio, [each.seconds for each in later]),
            ("cores", cores, [each.work for each in ahead]),
        ):
            errors = [abs(t / s - 1) for t, s in zip(told, seconds, strict=True)]
            all_errors.setdefault(name, []).extend(errors)
            first = sorted(range(len(told)), key=told.__getitem__)[:TRIALS]
            tried = min(seconds[i] for i in first)
            table.append(
                (
                    f"{family}, {name}",
                    f"{len(rows)}",
                    *mean_and_95th(errors),
                    f"{kendall(told, seconds):.2f}",
                    f"{seconds[first[0]] / min(seconds) - 1:.1%}",
                    f"{tried / min(seconds) - 1:.1%}",
                    f"{max(held) - 1:+.0%}",
                    f"{1 - min(held):+.0%}",
                    f"{took:.1f}",
                )
            )
    for name, errors in all_errors.items():
        table.append((f"all, {name}", f"{len(errors)}", *mean_and_95th(errors), *[""] * 6))
    print("\n".join(columns(table)))
    print("bars: " + ", ".join(f"{name} {bar}" for name, bar in BARS.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="language", choices=["language", "dense"])
    parser.add_argument("--plans", type=int, default=10, help="to measure, of those not done yet")
    parser.add_argument("--minutes", type=float, help="after which no other plan is begun")
    parser.add_argument("--seed", type=int, default=0, help="of the order of plans")
    parser.add_argument("--figures", help="default: FAMILY.json beside this file")
    parser.add_argument("--out", default=str(HERE / "steps.jsonl"), help="results, a line a plan")
    parser.add_argument("--report", action="store_true", help="what the results come to")
    arguments = parser.parse_args()
    report(arguments) if arguments.report else run(arguments)


if __name__ == "__main__":
    main()
