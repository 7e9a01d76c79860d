"""Layouts that `find_layout` chooses, against the time that steps take.

    python benchmarks/mesh/layouts.py

For each network and mesh it prices layouts by counts, with the speed of the devices here, and runs
steps of the cheapest ones, of those that the README of Mesh TensorFlow gives, and of some others.

    python benchmarks/mesh/layouts.py --model

measures a model, and runs steps of the plan that `pipemesh plan` chooses, and of the best plan that
it knows under each other set of layout rules.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import networks  # noqa: E402
import tensorflow as tf  # noqa: E402
from shared.speeds import Step, machine_of  # noqa: E402

from pipemesh.backend.devices import start_cpu_devices  # noqa: E402
from pipemesh.errors import PipemeshError  # noqa: E402
from pipemesh.lowering import PlacementLowering, Tensor, program_pricing  # noqa: E402
from pipemesh.mesh import LayoutRules, Mesh, find_layout  # noqa: E402
from pipemesh.plan import SearchSpace, predict, search  # noqa: E402
from pipemesh.plan.search import rated  # noqa: E402
from pipemesh.plan.stages import evenly_cut  # noqa: E402
from pipemesh.text import columns  # noqa: E402
from pipemesh.training.measuring import RegisteredSteps  # noqa: E402

MESHES = ["all:2", "rows:2;cols:2"]
# Of the two-layer network in the README of Mesh TensorFlow; in a block also of its heads.
README = {
    "all:2": ["batch:all", "hidden:all", "hidden:all;heads:all"],
    "rows:2;cols:2": ["batch:rows;hidden:cols", "batch:rows;hidden:cols;heads:cols"],
}
BAR = 1.03
TINY = "models.one_billion_word.params.OneBillionWordTiny"


def step_of(network: str, mesh: Mesh, rules: LayoutRules) -> Step:
    """A forward and a backward pass, with inputs and weights on their devices."""
    shapes = networks.shapes(network).values()
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    parts = []
    for shape, array in zip(shapes, networks.arrays(network).values(), strict=True):
        layout = rules.tensor_layout(shape, mesh)
        parts.append([])
        for at, device in enumerate(devices):
            with tf.device(device):
                parts[-1].append(tf.constant(array[layout.slice_ranges(at)]))

    @tf.function(autograph=False)
    def step() -> Any:
        lowering = PlacementLowering(mesh, rules, devices)
        with tf.GradientTape() as tape:
            tape.watch(parts[1:])
            tensors = [
                Tensor(lowering, tuple(own), shape)
                for own, shape in zip(parts, shapes, strict=True)
            ]
            loss = networks.pipemesh_loss(network, *tensors)
        return loss.slices[0], tape.gradient(loss.slices, parts[1:])

    return step.get_concrete_function()


def compare(network: str, mesh_text: str, rounds: int, count: int) -> dict[str, Any]:
    """Prices of layouts and seconds of their steps."""
    mesh = Mesh.from_text(mesh_text)
    start_cpu_devices(mesh.num_devices)
    machine = machine_of(mesh, rounds)
    shapes = networks.SHAPES[network]
    pricing = program_pricing(
        mesh,
        lambda *tensors: networks.pipemesh_loss(network, *tensors),
        shapes,
        machine,
        trained=list(shapes)[1:],
    )
    begin = time.perf_counter()
    found = find_layout(pricing, seconds=60)
    took = time.perf_counter() - begin
    known = {str(rules): price for rules, price in found.table}
    dims = set(pricing.sizes)
    hand = [LayoutRules.from_text(text) for text in ["", *README[mesh_text]]]
    hand = [rules for rules in hand if {dim for dim, _ in rules.rules} <= dims]
    others = [rules for rules, _ in found.table[1:]]
    # Axes of one length are interchangeable.
    chosen = [found.rules, *filter(first_rows, others)][:count]
    chosen += random.Random(0).sample(others, min(2, len(others)))
    every = {str(rules): rules for rules in [*chosen, *hand]}
    steps = {text: step_of(network, mesh, rules) for text, rules in every.items()}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {text: [] for text in steps}
    for _ in range(rounds):
        for text, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[text].append(time.perf_counter() - begin)
    rows = []
    for text, rules in every.items():
        price = known.get(text) or pricing.price(rules)
        rows.append([text, price.seconds, statistics.median(seconds[text])])
    return {
        "network": network,
        "mesh": mesh_text,
        "machine": str(machine),
        "search": took,
        "priced": len(found.table),
        "is_best": found.is_best,
        "chosen": str(found.rules),
        "rows": rows,
    }


def compare_model(name: str, devices: int) -> dict[str, Any]:
    """Forecasts and seconds of the chosen plan, and of the best plan under other layout rules."""
    model = RegisteredSteps(name, devices)
    figures = model.figures()
    begin = time.perf_counter()
    found = search(figures, SearchSpace(devices, model.rows))
    took = time.perf_counter() - begin
    # With a limit, if it limits nothing, candidates may cut weights too.
    space = SearchSpace(devices, model.rows, memory=1e18)
    plans = {str(found[0].plan): found[0]}
    rated_by_rules: dict[str, list[Any]] = {}
    for candidate in rated(figures, space):
        rated_by_rules.setdefault(candidate.rules(figures), []).append(candidate)
    for candidates in rated_by_rules.values():
        tried = []
        for candidate in candidates[:20]:
            with contextlib.suppress(PipemeshError):
                plan = evenly_cut(candidate.plan(figures, space), figures, model.rows)
                tried.append(predict(plan, figures, model.rows, parts=False))
        best = min(tried, key=lambda forecast: forecast.seconds)
        plans.setdefault(str(best.plan), best)
    seconds = model.seconds([forecast.plan for forecast in plans.values()])
    rows = zip(plans.items(), seconds, strict=True)
    return {
        "network": name,
        "mesh": f"{devices} devices",
        "machine": figures.about,
        "search": took,
        "priced": len(figures.layouts),
        "is_best": False,
        "chosen": str(found[0].plan),
        "rows": [[text, forecast.seconds, measured] for (text, forecast), measured in rows],
    }


def first_rows(rules: LayoutRules) -> bool:
    """Returns whether the first rule has the first axis, as one of each two alike layouts has."""
    return not rules.rules or rules.rules[0][1] in ("all", "rows")


def report(result: dict[str, Any]) -> None:
    """Prints a table, and how much slower the chosen layout is than the best of those measured."""
    print(f"\n{result['network']}, {result['mesh']}: {result['machine']}")
    table = [["layout", "priced ms", "measured ms"]]
    rows = sorted(result["rows"], key=lambda row: row[1])
    table += [[text or "-", f"{1e3 * p:.1f}", f"{1e3 * s:.1f}"] for text, p, s in rows]
    print("\n".join(columns(table)))
    measured = {text: seconds for text, _, seconds in result["rows"]}
    ratio = measured[result["chosen"]] / min(measured.values())
    verdict = "met" if ratio <= BAR else "NOT met"
    proven = "proven best" if result["is_best"] else "not proven best"
    print(
        f"chosen '{result['chosen']}' ({proven} of its prices, {result['priced']} priced in "
        f"{result['search']:.1f} s): {ratio:.3f} of the best measured; bar {BAR}: {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--count", type=int, default=6, help="cheapest layouts to measure")
    parser.add_argument("--networks", nargs="*", default=list(networks.SHAPES))
    parser.add_argument("--out", default=str(HERE / "layouts.json"))
    parser.add_argument("--model", nargs="?", const=TINY, help="a model with a plan")
    parser.add_argument("--devices", type=int, default=2, help="of --model")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "MESH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        report(compare_model(arguments.model, arguments.devices))
        return
    if arguments.one:
        print(json.dumps(compare(*arguments.one, arguments.rounds, arguments.count)))
        return
    results = []
    for network in arguments.networks:
        for mesh in MESHES:
            # The number of devices is set once a process.
            command = [sys.executable, __file__, "--one", network, mesh]
            command += [f"--rounds={arguments.rounds}", f"--count={arguments.count}"]
            quiet = None if os.environ.get("BENCHMARK_STDERR") else subprocess.DEVNULL
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=quiet, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            report(results[-1])
    pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
