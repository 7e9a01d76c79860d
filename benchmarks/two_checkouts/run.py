"""Whether a change made anything slower or larger: two checkouts in turn, within one run.

    python benchmarks/two_checkouts/run.py path/to/another/checkout

Both are measured by the other benchmarks, each checkout by its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Mapping

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from first_step.run import CASES, seconds_of
from memory.run import ENVIRONMENT
from shared.contender import ROOT, Contender, take_turns

BAR = 1.03
Samples = Mapping[str, list[float]]
Checkouts = Mapping[str, pathlib.Path]
STEPS = {
    "vs_lingvo": ("pipemesh, looped", "pipemesh, remat none", "pipemesh, remat full"),
    "executor": ("pipemesh, 1f1b",),
}
MEMORY = ("gpipe none", "1f1b none", "1f1b full", "zb_h1 none", "interleaved none")


def contender(checkout: pathlib.Path, benchmark: str, *flags: str, **environment: str) -> Contender:
    """A process of a checkout's own benchmark, with its own modules."""
    command = [sys.executable, str(checkout / "benchmarks" / benchmark / "run.py"), *flags]
    return Contender(command, {"PYTHONPATH": str(checkout), **environment})


def steps(checkouts: Checkouts, rounds: int) -> dict[str, Samples]:
    """Seconds of a step, one a round in turn."""
    found = {}
    for benchmark, names in STEPS.items():
        for name in names:
            both = {
                key: contender(checkout, benchmark, "--serve", name)
                for key, checkout in checkouts.items()
            }
            seconds, _, _ = take_turns(both, 3 * rounds, "this")
            found[f"step: {name}"] = seconds
    return found


def building(checkouts: Checkouts, rounds: int) -> dict[str, Samples]:
    """CPU seconds until tables of tiny stages have run once, row by row in turn."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(max(rounds // 3, 1)):
        both = {
            key: contender(checkout, "executor", "--serve", "building")
            for key, checkout in checkouts.items()
        }
        while this := (rows := {key: process.ask() for key, process in both.items()})["this"]:
            case = found.setdefault(f"building: {this['schedule']}, {this['form']}", {})
            for key, row in rows.items():
                case.setdefault(key, []).append(row["cpu"])
        for process in both.values():
            process.close()
    return found


def memory(checkouts: Checkouts, rounds: int) -> dict[str, Samples]:
    """MB at the peak of a process that computes a step."""
    flags = ("--counts", "16", "--blocks", "8", "--rows", "16384", "--what", "step")
    found = {}
    for name in MEMORY:
        found[f"memory: {name}"] = case = {key: [] for key in checkouts}
        for _ in range(max(rounds // 3, 1)):
            for key, checkout in checkouts.items():
                process = contender(checkout, "memory", "--serve", name, *flags, **ENVIRONMENT)
                case[key].append(process.ask()["VmHWM"])
                process.close()
    return found


def first_step(checkouts: Checkouts, rounds: int) -> dict[str, Samples]:
    """Seconds until the language model has trained one step."""
    found = {f"first step: {case}": {key: [] for key in checkouts} for case in CASES}
    for _ in range(rounds):
        for case, flags in CASES.items():
            for key, checkout in checkouts.items():
                found[f"first step: {case}"][key].append(seconds_of(checkout, flags))
    return found


PARTS: dict[str, Callable[[Checkouts, int], dict[str, Samples]]] = {
    "steps": steps,
    "building": building,
    "memory": memory,
    "first_step": first_step,
}


def ratio(samples: Samples) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(samples["this"], samples["other"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=pathlib.Path, help="another checkout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if not (arguments.other / "benchmarks").is_dir():
        parser.error(f"{str(arguments.other)!r} is no checkout of pipemesh: it has no benchmarks/")
    checkouts = {"other": arguments.other.resolve(), "this": ROOT}
    found: dict[str, Samples] = {}
    print(f"{'':42} {'other':>9} {'this':>9} {'ratio':>6}")
    for part in arguments.parts:
        rows = PARTS[part](checkouts, arguments.rounds)
        for case, samples in rows.items():
            other, this = (statistics.median(samples[key]) for key in ("other", "this"))
            print(f"{case:42} {other:9.3f} {this:9.3f} {ratio(samples):6.2f}", flush=True)
        of_part = statistics.median(map(ratio, rows.values()))
        told = "met" if of_part <= BAR else "NOT met"
        print(f"{part}: median of ratios {of_part:.3f} (bar {BAR}: {told})", flush=True)
        found |= rows
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "samples": found,
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
