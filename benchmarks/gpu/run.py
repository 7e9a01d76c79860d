"""One GPU: the language model and a stack of blocks, beside plain TensorFlow and products alone.

    python benchmarks/gpu/run.py
    python benchmarks/gpu/run.py --device_type=CPU --lm_flags="--model=OneBillionWordTiny"

Each contender is a process of its own, and they compute one step a round in turn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from lm.run import request_of, trainer_step
from shared.contender import Contender, serve_timed, take_turns
from shared.products import flops_of, of_language_model, of_stack, products_step
from shared.stack import Stack, quiet, sum_of_squares, tf2_step

# The embedded text supports no larger vocabulary than 3,244 pieces.
LM_FLAGS = "--model=OneBillionWordBase --vocab_size=3200"
BLOCKS = Stack(rows=2048, dim=512, hidden=2048, blocks=8, stages=1, microbatches=8)
SMALL = Stack(rows=64, dim=16, hidden=16, blocks=2, stages=2, microbatches=16)
PLAIN, PIPELINE, COMPILED, PRODUCTS = "plain TensorFlow", "pipeline", "compiled", "products alone"
SUBJECTS = {
    "language model": (PRODUCTS, PLAIN, PIPELINE, COMPILED),
    "8 blocks": (PRODUCTS, PLAIN, PIPELINE, COMPILED),
    "2 small blocks": (PLAIN, PIPELINE, COMPILED),
}
# An `F` and a `B` of each stage and microbatch.
ACTIONS = 2 * SMALL.stages * SMALL.microbatches


def lm_products(arguments: argparse.Namespace):
    settings = request_of(lm_flags(PLAIN, arguments), arguments.folder).settings
    return of_language_model(settings, settings.BATCH_SIZE)


def lm_flags(contender: str, arguments: argparse.Namespace) -> list[str]:
    plan = ["--plain"] if contender == PLAIN else ["--num_microbatches=4", "--remat=none"]
    plan += ["--compile"] * (contender == COMPILED)
    device = f"--device_type={arguments.device_type}"
    return [*arguments.lm_flags.split(), "--mesh_shape=layers:1", device, *plan]


def make_step(subject: str, contender: str, arguments: argparse.Namespace):
    quiet()
    on_lm = subject == "language model"
    if contender == PRODUCTS:
        products = lm_products(arguments) if on_lm else of_stack(BLOCKS)
        # Nobody asks for the gradient of the stack's inputs.
        return products_step(products, [f"{arguments.device_type}:0"], to_inputs=on_lm)
    if on_lm:
        return trainer_step(lm_flags(contender, arguments), arguments.folder)
    import pipemesh.layers

    stack = BLOCKS if subject == "8 blocks" else SMALL

    def make_params():
        if contender == PLAIN:
            return pipemesh.layers.FeatureExtractionLayer.Params().Set(
                name="plain", sub=stack.layers()
            )
        schedule = f"looped_bfs:{stack.stages}" if stack.stages > 1 else "gpipe"
        return stack.pipeline(
            pipemesh.layers, schedule=schedule, remat="none", compile=contender == COMPILED
        )

    return tf2_step(make_params, stack, 1, sum_of_squares, arguments.device_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device_type", default="GPU", choices=("GPU", "CPU"))
    parser.add_argument("--lm_flags", default=LM_FLAGS, help=f"default: {LM_FLAGS}")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_timed(make_step(*json.loads(arguments.serve), arguments))
        return
    print("| | | first step | step | TFLOP/s of products | of products alone |")
    print("|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = folder
        given = [f"--folder={folder}", f"--device_type={arguments.device_type}"]
        given.append(f"--lm_flags={arguments.lm_flags}")
        for subject, names in SUBJECTS.items():
            print_rows(subject, names, [sys.executable, __file__, *given], arguments)


def print_rows(
    subject: str, names: tuple[str, ...], command: list[str], arguments: argparse.Namespace
) -> None:
    """Measures the contenders of a subject in turn, and prints a row for each."""
    processes, first = {}, {}
    for name in names:
        begin = time.perf_counter()
        processes[name] = Contender([*command, "--serve", json.dumps([subject, name])])
        processes[name].ask()
        first[name] = time.perf_counter() - begin
    seconds, _, _ = take_turns(processes, arguments.rounds, PLAIN, [PRODUCTS])
    median = {name: statistics.median(times) for name, times in seconds.items()}
    flops = None
    if subject == "language model":
        flops = flops_of(lm_products(arguments))
    elif PRODUCTS in names:
        flops = flops_of(of_stack(BLOCKS), to_inputs=False)
    for name in names:
        rate = share = ""
        if flops is not None:
            rate = f"{flops / median[name] / 1e12:.2f}"
            pairs = zip(seconds[PRODUCTS], seconds[name], strict=True)
            share = f"{statistics.median(limit / mine for limit, mine in pairs):.2f}"
        step = f"{1e3 * median[name]:.1f} ms"
        print(
            f"| {subject} | {name} | {first[name]:.1f} s | {step} | {rate} | {share} |", flush=True
        )
    if flops is None:
        for name in (PIPELINE, COMPILED):
            each = 1e6 * (median[name] - median[PLAIN]) / ACTIONS
            print(f"{subject}, {name}: {each:.0f} µs for each of {ACTIONS} actions over plain")


if __name__ == "__main__":
    main()
