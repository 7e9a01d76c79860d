"""How far forecasts of plans are from steps of real computation, on plans that were not fitted.

    python benchmarks/plan/run.py --family=language --plans=50
    python benchmarks/plan/run.py --family=dense --plans=50
    python benchmarks/plan/run.py --report

Each call measures the family once (or takes --figures), and then so many plans that the results do
not have yet. Ten plans at a time are run in turn with plain steps: one device, one microbatch,
without remat; it may be ended after any ten. What a plain step took when the family was measured is
in the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.plan import Figures, Plan, SearchSpace, predict, search
from pipemesh.plan.figures import PLAIN
from pipemesh.plan.search import TRIALS, rated
from pipemesh.plan.stages import evenly_cut
from pipemesh.text import columns

HERE = pathlib.Path(__file__).resolve().parent
# The models of this project, which are not installed with the library.
sys.path.insert(0, str(HERE.parents[1]))
DEVICES, MOST_MICROBATCHES = 4, 8
# Rounds of each plan, and plans that are run in turn.
ROUNDS, TOGETHER = 30, 10
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

    asked = SearchSpace(DEVICES, figures.batch, schedules=SCHEDULES)
    fitted = {_uncut(plan) for plan in (*plans_to_fit(figures, DEVICES), PLAIN)}
    found: dict[str, Plan] = {}
    for candidate in rated(figures, asked):
        home = candidate.data * candidate.model
        if DEVICES % (candidate.layers * home) or candidate.num_microbatches > MOST_MICROBATCHES:
            continue
        try:
            plan = evenly_cut(candidate.plan(figures, asked), figures, figures.batch)
        except PipemeshError:
            # Such as of a table for other numbers of microbatches.
            continue
        if plan.mesh.num_devices > 1 or plan.num_microbatches > 1:
            found.setdefault(str(plan), plan)
    kept = sorted(text for text, plan in found.items() if _uncut(plan) not in fitted)
    random.Random(seed).shuffle(kept)
    return [found[text] for text in kept]


def _uncut(plan: Plan) -> str:
    """A plan whose layers are cut evenly is none of its own."""
    return str(dataclasses.replace(plan, boundaries=None))


def measured(make: Callable[[Plan], Any], batch: Any, plans: list[Plan]) -> list[dict[str, Any]]:
    """Steps of some plans in turn, each beside two plain steps, before and after it.

    A machine becomes slower and faster within seconds, so a plan's rounds lie as far apart as there
    are other plans, and count as shares of what plain steps took at the same time.
    """
    from pipemesh.backend.peak import TensorMemory
    from pipemesh.training.measuring.timed_step import TimedStep

    gc.collect()
    memory = TensorMemory("CPU:0")
    plain = TimedStep(make(PLAIN), batch)
    steps = [TimedStep(make(plan), batch) for plan in plans]
    rows: list[dict[str, Any]] = [
        {
            "plan": str(plan),
            "seconds": [],
            "cpu": [],
            "plain": [],
            "needed": [],
            "build": round(step.build, 2),
        }
        for plan, step in zip(plans, steps, strict=True)
    ]
    for _ in range(ROUNDS):
        before = plain.run()
        for row, step in zip(rows, steps, strict=True):
            held = memory.current
            memory.forget_peak()
            row["seconds"].append(round(step.run(), 6))
            row["needed"].append(memory.peak - held)
            row["cpu"].append(round(step.cpu, 6))
            after = plain.run()
            row["plain"].append(round((before + after) / 2, 6))
            before = after
    return rows


def run(arguments: argparse.Namespace) -> None:
    make, batch = started(arguments.family)
    from pipemesh.training.measuring.measure import measure

    path = pathlib.Path(arguments.figures or HERE / f"{arguments.family}.json")
    if not path.exists():
        found = measure(make, batch, DEVICES, lambda text: print(f"measuring {text}", flush=True))
        if not found.rules:
            raise SystemExit("the figures have no layout rules, so they cannot forecast all plans")
        path.write_text(found.to_json(), encoding="utf-8")
    figures = Figures.from_json(path.read_text(encoding="utf-8"), str(path))
    out = pathlib.Path(arguments.out)
    done = {
        _uncut(Plan.from_text(row["plan"]))
        for path in (out, *map(pathlib.Path, arguments.but))
        for row in rows_of(path)
        if row["family"] == arguments.family
    }
    begin = time.perf_counter()
    left = [plan for plan in plans_of(figures, arguments.seed) if _uncut(plan) not in done]
    left = left[: arguments.plans]
    for first in range(0, len(left), TOGETHER):
        if arguments.minutes and time.perf_counter() - begin > 60 * arguments.minutes:
            break
        plans = left[first : first + TOGETHER]
        for plan, row in zip(plans, measured(make, batch, plans), strict=True):
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"family": arguments.family} | row) + "\n")
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


def shares(row: dict[str, Any], rounds: slice = slice(None)) -> float:
    """What a plan's step took of a plain one's at the same time, over some rounds."""
    pairs = zip(row["seconds"][rounds], row["plain"][rounds], strict=True)
    return statistics.median(own / plain for own, plain in pairs)


def errors_row(name: str, told: list[float], seconds: list[float], took: str) -> tuple[str, ...]:
    """How far forecasts are off, how they order plans, and what choosing by them costs."""
    first = sorted(range(len(told)), key=told.__getitem__)[:TRIALS]
    tried = min(seconds[i] for i in first)
    return (
        name,
        f"{len(told)}",
        *mean_and_95th([abs(t / s - 1) for t, s in zip(told, seconds, strict=True)]),
        f"{kendall(told, seconds):.2f}",
        f"{seconds[first[0]] / min(seconds) - 1:.1%}",
        f"{tried / min(seconds) - 1:.1%}",
        took,
    )


def tau_of_errors(seconds: list[float], mean: float) -> float:
    """Kendall's tau of forecasts that are right but for random errors of so much on average."""
    rng = random.Random(0)
    # The mean of a normal distribution's absolute value is 0.8 of its standard deviation.
    spread = mean * math.sqrt(math.pi / 2)
    told = [[s * (1 + rng.gauss(0.0, spread)) for s in seconds] for _ in range(50)]
    return statistics.fmean(kendall(each, seconds) for each in told)


def memory_row(
    name: str, rows: list[dict[str, Any]], plans: list[Plan], figures: Figures
) -> tuple[str, ...]:
    """Forecasts of memory against what TensorFlow's allocator gave out.

    The logical devices of a CPU have one allocator, so forecasts of all devices are added up; and
    replicas share the weights there.
    """
    weights = sum(layer.parameter_bytes for layer in figures.layers)
    states = (1 + figures.optimizer) * weights
    whole: list[float] = []
    beside: list[float] = []
    for row, plan in zip(rows, plans, strict=True):
        ahead = predict(plan, figures, figures.batch, parts=False)
        home = plan.mesh.num_devices // plan.mesh.num_stages
        told = sum(ahead.memory) * home - (plan.num_replicas - 1) * weights
        # The first round finds free memory in pieces that the building of other plans has left.
        needed = max(row["needed"][1:])
        whole.append(told / (states + needed) - 1)
        beside.append((told - states) / needed - 1)
    each = (f"{r:+.1%}" for r in (min(whole), statistics.median(whole), max(whole)))
    return name, f"{len(rows)}", *each, f"{statistics.median(beside):+.1%}"


def report(arguments: argparse.Namespace) -> None:
    """Errors by the clock, in turn, at pace, of plans with themselves and of cores; memory."""
    head = ("against", "plans", "mean error", "95th", "tau", "regret", f"of {TRIALS}", "search s")
    times: list[tuple[str, ...]] = [head]
    memories: list[tuple[str, ...]] = [
        ("memory, forecast over measured", "plans", "least", "median", "most", "without states")
    ]
    everything = list(rows_of(pathlib.Path(arguments.out)))
    both: dict[str, tuple[list[float], list[float]]] = {}
    for family in sorted({row["family"] for row in everything}):
        rows = [row for row in everything if row["family"] == family]
        path = pathlib.Path(arguments.figures or HERE / f"{family}.json")
        figures = Figures.from_json(path.read_text(encoding="utf-8"), str(path))
        plans = [Plan.from_text(row["plan"]) for row in rows]
        begin = time.perf_counter()
        search(figures, SearchSpace(DEVICES, figures.batch, schedules=SCHEDULES))
        took = f"{time.perf_counter() - begin:.1f}"
        usual = statistics.median(x for row in rows for x in row["plain"])
        turn = [usual * shares(row) for row in rows]
        half = len(rows[0]["seconds"]) // 2
        ahead = [predict(plan, figures, figures.batch, parts=False) for plan in plans]
        now = figures.at_pace(usual)
        later = [predict(plan, now, now.batch, parts=False) for plan in plans]
        for name, told, seconds in (
            (
                "the clock",
                [each.seconds for each in ahead],
                [statistics.median(row["seconds"]) for row in rows],
            ),
            ("in turn", [each.seconds for each in ahead], turn),
            ("at pace", [each.seconds for each in later], turn),
            (
                "itself",
                [shares(row, slice(half)) for row in rows],
                [shares(row, slice(half, None)) for row in rows],
            ),
            (
                "cores",
                [each.work for each in ahead],
                [statistics.median(row["cpu"]) for row in rows],
            ),
        ):
            times.append(errors_row(f"{family}, {name}", told, seconds, took))
            for old, new in zip(both.setdefault(name, ([], [])), (told, seconds), strict=True):
                old.extend(new)
        for mean in (BARS["mean"], 0.02):
            name = f"{family}, random errors of {mean:.0%}"
            tau = f"{tau_of_errors(turn, mean):.2f}"
            times.append((name, f"{len(rows)}", f"{mean:.1%}", "", tau, "", "", ""))
        alone = [i for i, plan in enumerate(plans) if plan.mesh.num_devices == 1]
        for name, chosen in (("one device", alone), ("all", range(len(rows)))):
            # Nothing is known where TensorFlow does not count the CPU's memory.
            if chosen and all(max(rows[i]["needed"]) for i in chosen):
                some, of = [rows[i] for i in chosen], [plans[i] for i in chosen]
                memories.append(memory_row(f"{family}, {name}", some, of, figures))
    for name, (told, seconds) in both.items():
        errors = [abs(t / s - 1) for t, s in zip(told, seconds, strict=True)]
        times.append((f"both, {name}", f"{len(told)}", *mean_and_95th(errors), *[""] * 4))
    print("\n".join(columns(times)))
    print("\n".join(["", *columns(memories)]))
    print("\nbars: " + ", ".join(f"{name} {bar}" for name, bar in BARS.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="language", choices=["language", "dense"])
    parser.add_argument("--plans", type=int, default=10, help="to measure, of those not done yet")
    parser.add_argument("--minutes", type=float, help="after which no other plan is begun")
    parser.add_argument("--seed", type=int, default=0, help="of the order of plans")
    parser.add_argument("--figures", help="default: FAMILY.json beside this file")
    parser.add_argument("--out", default=str(HERE / "steps.jsonl"), help="results, a line a plan")
    parser.add_argument(
        "--but", nargs="*", default=[], help="results of before, whose plans are left out"
    )
    parser.add_argument("--report", action="store_true", help="what the results come to")
    arguments = parser.parse_args()
    report(arguments) if arguments.report else run(arguments)


if __name__ == "__main__":
    main()
