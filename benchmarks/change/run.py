"""Whether the change that a report names helps as much as it says.

    python benchmarks/change/run.py --json=change.json

Each plan has one fault. The language model is trained under it by the command, with
`--trace_schedule`; then steps of the plan and of the plan with the change that the report names
first are run in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from pipemesh.plan import Plan, predict
from pipemesh.report import read
from pipemesh.report.plan_changes import basis_of, best, least
from pipemesh.text import columns

# The models of this project, which are not installed with the library.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
MODEL = "OneBillionWordTiny"
FAULTS = {
    "two microbatches": "mesh=layers:2 num_microbatches=2 remat=none",
    "a bad cut": "mesh=layers:2 num_microbatches=8 remat=none boundaries=0,6,7",
    "all computed again": "mesh=layers:2 num_microbatches=8 remat=full",
}
STEPS = 8


def named(plan: Plan, folder: str, figures: str | None) -> dict[str, Any]:
    """Trains under a plan; what the record of it says would help most."""
    words = [sys.executable, "-m", "models.one_billion_word.train", f"--logdir={folder}"]
    words += [f"--model={MODEL}", f"--steps={STEPS}", "--trace_schedule", "--eval_batches=1"]
    for name, (_, text) in Plan().changes(plan).items():
        words.append(f"--{'mesh_shape' if name == 'mesh' else name}={text}")
    words.append(f"--remat={plan.remat}")
    if figures:
        words.append(f"--figures={figures}")
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=900)
    basis = basis_of(read(folder))
    assert not isinstance(basis, str), basis
    now = predict(basis.plan, basis.figures, basis.batch).seconds
    chosen = best(basis.changes(), now)
    helps = 1 - chosen.prediction.seconds / now > least(chosen)
    return {
        "flags": chosen.flags if helps else f"none ({chosen.flags})",
        "predicted": 1 - chosen.prediction.seconds / now,
        "plan": str(basis.plan),
        "changed": str(Plan.from_values(plan.to_values() | dict(chosen.values))),
    }


def timed(one: Plan, other: Plan, rounds: int) -> dict[str, float]:
    """Steps of two plans in turn: by how much the other is shorter, and what each takes."""
    from pipemesh.training.measuring.timed_step import TimedStep

    subjects = [model(plan) for plan in (one, other)]
    batch = next(iter(subjects[0].train_data(0)))
    steps = [TimedStep(subject, batch) for subject in subjects]
    taken: list[list[float]] = []
    for _ in range(rounds):
        taken.append([step.run() for step in steps])
    del steps
    gc.collect()
    ratios = sorted(1 - after / before for before, after in taken)
    return {
        "measured": statistics.median(ratios),
        "lower": ratios[len(ratios) // 4],
        "upper": ratios[(3 * len(ratios)) // 4],
        "before": statistics.median(before for before, _ in taken),
        "after": statistics.median(after for _, after in taken),
    }


def model(plan: Plan) -> Any:
    from models.one_billion_word.params import CONFIGURATIONS
    from pipemesh.training.registered import RegisteredModel

    return RegisteredModel(CONFIGURATIONS[MODEL](), MODEL, plan.to_values())


def start() -> None:
    """TensorFlow with two devices, as the command has it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from absl import flags, logging

    from pipemesh.layers import lingvo_loader as _  # noqa: F401

    logging.set_verbosity(logging.ERROR)
    flags.FLAGS.mark_as_parsed()
    from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices

    prepare_graphs_quickly()
    start_cpu_devices(2)
    from lingvo.core import py_utils

    py_utils.SetEagerMode(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--rounds", type=int, default=15, help="of steps in turn")
    parser.add_argument("--figures", help="of the model, by `pipemesh plan --save`")
    parser.add_argument("--json", help="results")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(arguments.faults):
            plan = Plan.from_text(FAULTS[fault])
            found[fault] = named(plan, os.path.join(folder, str(number)), arguments.figures)
    start()
    rows = [
        (
            "fault",
            "the change that is named (or was best)",
            "predicted",
            "measured",
            "quartiles",
            "ms",
        )
    ]
    for fault, each in found.items():
        one, other = Plan.from_text(each["plan"]), Plan.from_text(each["changed"])
        if other.boundaries is None and other.num_stages == one.num_stages:
            other = dataclasses.replace(other, boundaries=one.boundaries)
        each |= timed(one, other, arguments.rounds)
        rows.append(
            (
                fault,
                each["flags"],
                f"{each['predicted']:.1%}",
                f"{each['measured']:.1%}",
                f"{each['lower']:.1%} to {each['upper']:.1%}",
                f"{1e3 * each['before']:.0f} to {1e3 * each['after']:.0f}",
            )
        )
    print("\n".join(columns(rows, left=(0, 1))))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
