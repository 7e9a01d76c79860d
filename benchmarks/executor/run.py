"""What the executor adds to the simulated makespan, and a real step against lingvo and torch.

    python benchmarks/executor/run.py

Five parts, each with processes of its own: waiting cells, sums of gradients that hide behind other
stages, build time, growth with the number of devices, and two real stages.
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
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import building
import growing
import overlap
import waiting
from shared.contender import Contender, serve, serve_timed, take_turns
from shared.mkl_shim import mkl_shim
from shared.stack import Stack, lingvo_step, quiet, set_threads, summed_head_params, tf2_step
from shared.torch_environment import TORCH, torch_python, torch_version

HERE = pathlib.Path(__file__).resolve().parent
WAITING_BAR, BUILD_BAR = 1.04, 1.5e-3
STACK = Stack(rows=2048, dim=512, hidden=2048, blocks=8, stages=2, microbatches=8)
PIPEMESH = "pipemesh, 1f1b"
GROWING = [name for name in waiting.TABLES if name not in (waiting.SEARCHED, waiting.SLICED)]
BARS = {"lingvo": 0.45, "torch": 0.8, "torch, AVX-512": 0.8}


def make_step(name: str):
    quiet()
    if name == "lingvo":
        return lingvo_step(STACK, inter_op=4)
    set_threads(inter_op=STACK.stages, intra_op=1, num_devices=STACK.stages)
    import pipemesh.layers

    def make_params():
        return STACK.pipeline(
            pipemesh.layers,
            summed_head_params(),
            schedule="1f1b",
            loss_inside=True,
            remat="none",
        )

    return tf2_step(make_params, STACK, STACK.stages, lambda outputs: outputs[0])


def ask_all(part: str, arguments: argparse.Namespace) -> Iterator[Any]:
    """The rows of a part that has a process of its own."""
    command = [sys.executable, __file__, "--serve", part, "--waiting_rounds"]
    command += [str(arguments.waiting_rounds), "--microbatches", str(arguments.microbatches)]
    command += ["--waiting_tables", *arguments.waiting_tables]
    command += ["--overlap_rounds", str(arguments.overlap_rounds)]
    contender = Contender(command)
    while (row := contender.ask()) is not None:
        yield row
    contender.close()


def verdict(met: bool) -> str:
    return "met" if met else "NOT met"


def waiting_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"Waiting cells: {waiting.DEVICES} devices, {arguments.microbatches} microbatches, "
        f"{1e3 * waiting.FORWARD:.0f} ms forward and {1e3 * waiting.BACKWARD:.0f} ms backward a "
        f"device; median of {arguments.waiting_rounds} runs. In brackets: against a simulation in "
        "which a whole B hands on the input gradient after its first half, as the cells of tables "
        "with I and W do. Own: against a simulation with the waits as long as they were. Wait: "
        "mean error of waits, before calibration and after. Latency: from when an action could "
        "start until it did, median, on one device and from another."
    )
    print(
        f"| schedule | form | actions | simulated | measured | ratio | bar {WAITING_BAR} | own "
        "| wait | latency |"
    )
    print("|---|---|--:|--:|--:|--:|---|--:|--:|--:|")
    rows = []
    for row in ask_all("waiting", arguments):
        rows.append(row)
        measured = statistics.median(row["seconds"])
        row["ratio"] = measured / row["simulated"]
        row["ratio_halved"] = measured / row["simulated_halved"]
        row["ratio_own"] = statistics.median(
            one / two for one, two in zip(row["seconds"], row["simulated_own"], strict=True)
        )
        ratio = f"{row['ratio']:.3f}"
        if row["simulated_halved"] != row["simulated"]:
            ratio += f" ({row['ratio_halved']:.3f})"
        latency = [statistics.median(row[kind] or [0.0]) for kind in ("local", "remote")]
        print(
            f"| {row['schedule']} | {row['form']} | {row['actions']} "
            f"| {1e3 * row['simulated']:.0f} ms | {1e3 * measured:.0f} ms | {ratio} "
            f"| {verdict(row['ratio'] <= WAITING_BAR)} | {row['ratio_own']:.3f} "
            f"| {1e3 * row['overshoot_before']:+.2f}, {1e3 * row['overshoot']:+.2f} ms "
            f"| {1e3 * latency[0]:.2f}, {1e3 * latency[1]:.2f} ms |",
            flush=True,
        )
    print()
    return rows


def overlap_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"Sums of gradients, and fetches of weights: {overlap.PLACES} stages or pairs of stages, "
        f"each with {overlap.REPLICAS} replicas, {overlap.MICROBATCHES} microbatches; those of a "
        f"device's stages take {1e3 * overlap.SUM:.0f} ms on its link, or "
        f"{500 * overlap.FETCH:.0f} ms for each action that fetches. Steps with "
        "links that wait and that do not, in turn, median of "
        f"{arguments.overlap_rounds}. Hidden: the share of the busiest link's time by which the "
        f"step is not longer; at most {overlap.BAR:.0%} of them off the simulated one."
    )
    print("| schedule | form | simulated | step | free links | hidden | simulated | bar |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    rows = []
    for row in ask_all("overlap", arguments):
        rows.append(row)
        step, free = (statistics.median(row[name]) for name in ("seconds", "without"))
        off = abs(row["hidden"] - row["hidden_simulated"])
        print(
            f"| {row['case']} | {row['form']} | {1e3 * row['simulated']:.0f} ms "
            f"| {1e3 * step:.0f} ms | {1e3 * free:.0f} ms | {row['hidden']:.1%} "
            f"| {row['hidden_simulated']:.1%} | {verdict(off <= overlap.BAR)} |",
            flush=True,
        )
    print()
    return rows


def building_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"Build time of the same tables with small dense stages, an action: tracing, for which the "
        f"bar is {1e3 * BUILD_BAR} ms, and TensorFlow's own work, the first run less the second. "
        "CPU: of both."
    )
    print("| schedule | form | actions | operations | trace | bar | first run | both | CPU |")
    print("|---|---|--:|--:|--:|---|--:|--:|--:|")
    rows = []
    for row in ask_all("building", arguments):
        rows.append(row)
        trace, first = row["trace"] / row["actions"], row["first_run"] / row["actions"]
        print(
            f"| {row['schedule']} | {row['form']} | {row['actions']} | {row['operations']} "
            f"| {1e3 * trace:.2f} ms | {verdict(trace <= BUILD_BAR)} "
            f"| {1e3 * first:.2f} ms | {1e3 * (trace + first):.2f} ms "
            f"| {1e3 * row['cpu'] / row['actions']:.2f} ms |",
            flush=True,
        )
    print()
    return rows


def growth_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"Growth: small dense stages, {growing.MICROBATCHES_A_DEVICE} microbatches a device; the "
        "operations of the graph and its functions, tracing, and the first run, a step included, "
        f"for both of which the bar is {growing.BAR:.0f} s. Waiting: a step against the simulation."
    )
    print(
        "| schedule | form | devices | actions | operations | trace | first run | both | bar "
        "| step | memory |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|")
    rows = []
    for name in arguments.growth_tables:
        for form in arguments.growth_forms:
            for devices in arguments.devices:
                row = asked_of_one(name, devices, form, arguments.growth_waits)
                rows.append(row)
                both = row["trace"] + row["first_run"]
                step = f"{1e3 * row['step']:.0f} ms"
                if row["waits"]:
                    both -= row["step"]
                    step += f", {row['step'] / row['simulated']:.3f} of the simulation"
                print(
                    f"| {name} | {form} | {devices} | {row['actions']} | {row['operations']} "
                    f"| {row['trace']:.1f} s | {row['first_run']:.1f} s | {both:.1f} s "
                    f"| {verdict(both <= growing.BAR)} | {step} | {row['megabytes']:.0f} MB |",
                    flush=True,
                )
    print()
    return rows


def asked_of_one(name: str, devices: int, form: str, waits: bool) -> dict[str, Any]:
    """A row of `growing`, from a process of its own."""
    what = json.dumps([name, devices, form, waits])
    contender = Contender([sys.executable, __file__, "--serve", "growth", "--row", what])
    row = contender.ask()
    contender.close()
    return row


def contenders_of(arguments: argparse.Namespace) -> dict[str, Contender]:
    python = torch_python(arguments.torch_python)
    stack = json.dumps(dataclasses.asdict(STACK))
    torch = [python, str(HERE / "torch_stack.py"), "--stack", stack]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    contenders = {
        name: Contender([sys.executable, __file__, "--serve", name])
        for name in (PIPEMESH, "lingvo")
    }
    contenders["torch"] = Contender(torch, threads)
    shim = mkl_shim()
    if shim is not None:
        contenders["torch, AVX-512"] = Contender(torch, {**threads, "LD_PRELOAD": shim})
    return contenders


def stages_part(arguments: argparse.Namespace) -> dict[str, Any]:
    print(
        f"{STACK}, one thread a stage, {arguments.rounds} rounds in turn. Last column: the step "
        f"over its CPU time spread over {STACK.stages} cores, 1 if no core is ever idle."
    )
    seconds, cpu_seconds, results = take_turns(contenders_of(arguments), arguments.rounds, PIPEMESH)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    cpu = {name: statistics.median(times) for name, times in cpu_seconds.items()}
    print("| | median | quartiles | pipemesh / it | bar | CPU a step | / ideal |")
    print("|---|--:|--:|--:|---|--:|--:|")
    # Each round's steps ran one right after the other, so their ratio suffers least from what
    # else the machine does.
    paired = {}
    for name, times in seconds.items():
        paired[name] = statistics.median(
            ours / theirs for ours, theirs in zip(seconds[PIPEMESH], times, strict=True)
        )
        low, _, high = statistics.quantiles(times, n=4)
        bar = f"{BARS[name]}: {verdict(paired[name] <= BARS[name])}" if name in BARS else ""
        print(
            f"| {name} | {1e3 * median[name]:.0f} ms | {1e3 * low:.0f} - {1e3 * high:.0f} ms "
            f"| {paired[name]:.2f} | {bar} | {1e3 * cpu[name]:.0f} ms "
            f"| {median[name] * STACK.stages / cpu[name]:.2f} |"
        )
    print()
    return {
        "torch": torch_version(torch_python(arguments.torch_python)),
        "loss_and_norm": results,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "median": median,
        "paired_ratio": paired,
    }


PARTS = {
    "waiting": waiting_part,
    "overlap": overlap_part,
    "building": building_part,
    "growth": growth_part,
    "stages": stages_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=15, help="of real stages")
    parser.add_argument("--waiting_rounds", type=int, default=3, help="of waiting cells")
    parser.add_argument("--overlap_rounds", type=int, default=15, help="of sums and fetches")
    parser.add_argument(
        "--waiting_tables", nargs="+", choices=waiting.TABLES, default=waiting.TABLES
    )
    parser.add_argument("--microbatches", type=int, default=waiting.MICROBATCHES)
    parser.add_argument(
        "--torch_python",
        help=f"a Python that has {TORCH}; by default one is installed below this folder",
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 16, 32, 64], help="of growth")
    parser.add_argument(
        "--growth_tables", nargs="+", choices=[*GROWING, waiting.SEARCHED], default=GROWING
    )
    parser.add_argument(
        "--growth_forms", nargs="+", choices=growing.FORMS, default=["default"], help="of growth"
    )
    parser.add_argument(
        "--growth_waits", action="store_true", help="stages that wait instead of dense ones"
    )
    parser.add_argument("--out", default=str(HERE / "result.json"))
    arguments = parser.parse_args()
    if arguments.microbatches < 2 * waiting.DEVICES:
        parser.error(f"DualPipeV needs at least {2 * waiting.DEVICES} microbatches")
    if arguments.serve == "overlap":
        rows = overlap.measure(arguments.overlap_rounds)
        serve(lambda: next(rows, None))
        return
    if arguments.serve in ("waiting", "building"):
        counts = waiting.DEVICES, arguments.microbatches
        rows = (
            waiting.measure(arguments.waiting_tables, arguments.waiting_rounds, *counts)
            if arguments.serve == "waiting"
            else building.measure(*counts)
        )
        serve(lambda: next(rows, None))
        return
    if arguments.serve == "growth":
        rows = iter([growing.measure(*json.loads(arguments.row))])
        serve(lambda: next(rows, None))
        return
    if arguments.serve:
        serve_timed(make_step(arguments.serve))
        return
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{part: PARTS[part](arguments) for part in arguments.parts},
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
