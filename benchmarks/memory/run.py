"""Peak resident memory of a training step against the number of microbatches.

    python benchmarks/memory/run.py

Every measurement is a fresh process, two of them at a time. Microbatches keep their size, so the
batch grows with their number.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import platform
import signal
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import Contender, serve
from shared.resident import FREED_AT_ONCE, resident
from shared.stack import (
    Stack,
    lingvo_step,
    quiet,
    row_head_params,
    set_threads,
    summed_head_params,
    tf2_step,
)

HERE = pathlib.Path(__file__).resolve().parent
DEVICES, ROWS = 4, 16384  # Rows of a microbatch.
STACK = Stack(rows=0, dim=64, hidden=128, blocks=8, stages=DEVICES, microbatches=0, features=2)
COUNTS = (4, 8, 16, 32, 64)
LINGVO, BASELINE = "lingvo", "baseline"
STAGES_A_DEVICE = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved": 2, "zb_v": 2}
CONTENDERS = [
    *(f"{schedule} {remat}" for schedule in STAGES_A_DEVICE for remat in ("none", "full")),
    "zb_h1 twice",
    "zb_v twice",
    "1f1b except_last",
    "1f1b selective",
    "1f1b none actions",
    LINGVO,
]
# Must be flat. Action by action, the graph grows with the number of microbatches.
LEAN = [
    name
    for name in CONTENDERS
    if name.split()[0] in ("1f1b", "zb_h1", "zb_v") and "actions" not in name
]
TINY_ROWS = 8
BAR_LINGVO, BAR_FLAT, FLAT_FROM = 0.4, 1.2, 8


def stack_of(name: str, microbatches: int, blocks: int, rows: int = ROWS) -> Stack:
    """The stack, cut as a contender wants it."""
    return dataclasses.replace(
        STACK,
        rows=rows * microbatches,
        blocks=blocks,
        stages=DEVICES * STAGES_A_DEVICE.get(name.split()[0], 1),
        microbatches=microbatches,
    )


def make_params(name: str, stack: Stack) -> Any:
    """The params of a pipeline of ours."""
    import pipemesh.layers
    from pipemesh.recurrent import Selective

    schedule, remat, *_ = name.split()
    return stack.pipeline(
        pipemesh.layers,
        summed_head_params(),
        schedule=schedule,
        loss_inside=True,
        remat=Selective(lambda layer: layer[-1] in "02468") if remat == "selective" else remat,
        # By default the executor decides by the size, which would put a step into the curves.
        loop=not name.endswith("actions"),
    )


def make_step(name: str, stack: Stack, computes: bool):
    quiet()
    if name == LINGVO:
        # The loss of each row inside, so that no contender returns the last block's output.
        return lingvo_step(stack, DEVICES, row_head_params(), _sum, computes)
    set_threads(inter_op=DEVICES, intra_op=1, num_devices=DEVICES)
    step = tf2_step(lambda: make_params(name, stack), stack, DEVICES, lambda outputs: outputs[0])
    return step if computes else lambda: (0.0, 0.0)


def _sum(y: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_sum(y)


def answer(name: str, stack: Stack, computes: bool) -> dict[str, float]:
    """A step; its results, and the resident set in MB: the peak, and what stays after it."""
    loss, norm = make_step(name, stack, computes)()
    megabytes = {key: number / 1e6 for key, number in resident().items()}
    return {"loss": loss, "norm": norm, **megabytes}


def measure(
    name: str, microbatches: int, blocks: int, rows: int = ROWS, what: str = "step"
) -> dict[str, float]:
    """One fresh process; `what` is a step, or only its variables, or the prediction."""
    command = [sys.executable, __file__, "--serve", name, "--counts", str(microbatches)]
    command += ["--blocks", str(blocks), "--rows", str(rows)]
    contender = Contender([*command, "--what", what], FREED_AT_ONCE)
    result = contender.ask()
    contender.close()
    return result


def predicted(name: str, stack: Stack) -> dict[str, float]:
    """MB that stages keep for later actions: the sum over devices of each one's peak."""
    quiet()
    set_threads(inter_op=DEVICES, intra_op=1, num_devices=DEVICES)
    import tensorflow as tf
    from lingvo.core import py_utils

    from pipemesh.layers import mesh_cluster
    from pipemesh.mesh import Mesh

    py_utils.SetEagerMode(True)
    with mesh_cluster(Mesh((("layers", DEVICES),))):
        py_utils.GetOrCreateGlobalStepVar()
        layer = make_params(name, stack).Instantiate()
        devices = layer.PredictMemory(tf.TensorSpec(stack.batch_shape()))
    return {"kept": sum(device.kept for device in devices) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument(
        "--blocks", type=int, default=STACK.blocks, help="a multiple of the number of stages"
    )
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--out", default=str(HERE / "result.json"))
    parser.add_argument("--plot", default=str(HERE / "peak.svg"))
    arguments = parser.parse_args()
    if arguments.serve:
        stack = stack_of(arguments.serve, arguments.counts[0], arguments.blocks, arguments.rows)
        if arguments.what == "prediction":
            serve(lambda: predicted(arguments.serve, stack))
        else:
            serve(lambda: answer(arguments.serve, stack, arguments.what == "step"))
        return
    names = [name for name in CONTENDERS if name in arguments.contenders]
    for name in names:
        if arguments.blocks % (stages := stack_of(name, 1, arguments.blocks).stages):
            parser.error(f"--blocks={arguments.blocks}: {name} has {stages} stages; leave it out")
    # At once, with all processes: the pool would wait for them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        baselines = {
            name: pool.submit(measure, name, COUNTS[0], arguments.blocks, what="variables")
            for name in ("1f1b none", LINGVO)
        }
        running = {
            (name, count): pool.submit(measure, name, count, arguments.blocks)
            # The longest first.
            for count in sorted(arguments.counts, reverse=True)
            for name in names
        }
        # With hardly any rows, what is left is the graph and what was needed to build it.
        programs = {
            name: pool.submit(measure, name, max(arguments.counts), arguments.blocks, TINY_ROWS)
            for name in names
        }
        predictions = {
            name: pool.submit(
                measure, name, max(arguments.counts), arguments.blocks, what="prediction"
            )
            for name in names
            if name != LINGVO
        }
        baseline = {name: future.result() for name, future in baselines.items()}
        found = {key: future.result() for key, future in running.items()}
        program = {name: future.result() for name, future in programs.items()}
        kept = {name: future.result()["kept"] for name, future in predictions.items()}
    check(found)
    report(names, found, program, kept, baseline, arguments)


def check(found: dict[tuple[str, int], dict[str, float]]) -> None:
    """All compute the same, to what sums in another order differ by."""
    wanted: dict[int, dict[str, float]] = {}
    for (name, count), result in found.items():
        for key, value in wanted.setdefault(count, result).items():
            if key in ("loss", "norm") and abs(result[key] - value) > 1e-3 * abs(value):
                raise SystemExit(f"{name}, {count} microbatches, computes something else: {result}")


def report(names, found, program, kept, baseline, arguments) -> None:
    counts = sorted(arguments.counts)

    def above(name: str, measured: dict[str, float]) -> float:
        base = baseline[LINGVO if name == LINGVO else "1f1b none"]
        return measured["VmHWM"] - base["VmRSS"]

    peaks = {name: {count: above(name, found[name, count]) for count in counts} for name in names}
    print(
        f"{arguments.blocks} blocks {STACK.dim}-{STACK.hidden}-{STACK.dim}, {DEVICES} devices, "
        f"microbatches of {ROWS} rows. Peak resident set in MB above that of a process with the "
        f"variables ({baseline['1f1b none']['VmRSS']:.0f} MB, lingvo "
        f"{baseline[LINGVO]['VmRSS']:.0f} MB). Graph: the peak with the most microbatches, "
        f"but of {TINY_ROWS} rows, so that tensors take no room. Kept: what stages keep "
        "for later actions then, as predicted before anything runs."
    )
    print(f"| | {' | '.join(map(str, counts))} | graph | kept | / lingvo |")
    print("|---|" + "--:|" * (len(counts) + 3))
    for name in names:
        last = counts[-1]
        ratio = f"{peaks[name][last] / peaks[LINGVO][last]:.2f}" if LINGVO in peaks else ""
        print(
            f"| {name} | {' | '.join(f'{peaks[name][count]:.0f}' for count in counts)} "
            f"| {above(name, program[name]):.0f} | {f'{kept[name]:.0f}' if name in kept else ''} "
            f"| {ratio} |"
        )
    verdicts = {}
    for name in set(names) & set(LEAN):
        growth = peaks[name][counts[-1]] / peaks[name][max(FLAT_FROM, counts[0])]
        verdicts[name] = {"growth": growth, "flat": growth <= BAR_FLAT}
        if LINGVO in peaks:
            ratio = peaks[name][counts[-1]] / peaks[LINGVO][counts[-1]]
            verdicts[name].update(ratio=ratio, lean=ratio <= BAR_LINGVO)
    for name in names:
        if name in verdicts:
            words = [
                f"{verdicts[name]['growth']:.2f} times as much as with {FLAT_FROM} microbatches "
                f"(bar {BAR_FLAT}: {'met' if verdicts[name]['flat'] else 'NOT met'})"
            ]
            if "ratio" in verdicts[name]:
                words.append(
                    f"{verdicts[name]['ratio']:.2f} of lingvo's "
                    f"(bar {BAR_LINGVO}: {'met' if verdicts[name]['lean'] else 'NOT met'})"
                )
            print(f"{name}, {counts[-1]} microbatches: {', '.join(words)}")
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "blocks": arguments.blocks,
        "environment": FREED_AT_ONCE,
        "baseline": baseline,
        "graph": program,
        "kept": kept,
        "measured": [{"name": n, "microbatches": c, **r} for (n, c), r in sorted(found.items())],
        "peak_above_baseline": peaks,
        "verdicts": verdicts,
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")
    plot(peaks, counts, arguments.plot)


# Dashes by policy of recomputation.
DASHES = ("none", "full", "except_last", "selective", "none actions", "twice")


def plot(peaks: dict[str, dict[int, float]], counts: list[int], path: str) -> None:
    """Draws a curve for each contender: colours are schedules, dashes policies."""
    # Processes that are measured do not load it.
    from pipemesh.report.svg import Series, line_chart

    looks: dict[str, int] = {}
    series: list[Series] = []
    for name, values in peaks.items():
        schedule, _, remat = name.partition(" ")
        look = looks.setdefault(schedule, len(looks))
        dash = DASHES.index(remat) if remat else 0
        series.append(Series(name, [(count, values[count]) for count in counts], look, dash=dash))
    svg = line_chart(
        "Peak resident memory above the variables, MB",
        series,
        until=counts[-1],
        axis="microbatches of constant size",
        is_doubling=True,
        width=800,
        height=420,
    )
    pathlib.Path(path).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
