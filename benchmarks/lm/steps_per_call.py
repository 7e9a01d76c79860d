"""Milliseconds a step of small models with several steps in one call (`--steps_per_call`)."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MODELS = {
    "digits, without a pipeline": ("models.digits.params.DigitsPlain", None),
    "digits, two stages": ("models.digits.params.DigitsPipelined", None),
    "OneBillionWordTiny, two stages": ("models.one_billion_word.params.OneBillionWordTiny", None),
}


def measured(model: str, mesh: str | None, number: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds a step in each round, of calls of one step and of `number` steps in turn."""
    from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices

    prepare_graphs_quickly()
    start_cpu_devices(2)
    from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

    from lingvo.core import py_utils

    from pipemesh.training import Options, Trainer
    from pipemesh.training.registered import RegisteredModel, find_model

    py_utils.SetEagerMode(True)
    subject = RegisteredModel(find_model(model)(), model, {"mesh": mesh} if mesh else {})
    trainer = Trainer(subject, Options(logdir=tempfile.mkdtemp(), steps=10**6))

    def one_by_one() -> None:
        for _ in range(number):
            trainer.train_step()

    ways = {"one": one_by_one, "several": lambda: trainer.train_steps(number)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for counted in [False] + [True] * rounds:
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            if counted:
                seconds[name].append((time.perf_counter() - begin) / number)
    return seconds


def main() -> None:
    """Measures each model in a process of its own, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--steps_per_call", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    number, rounds = arguments.steps_per_call, arguments.rounds
    if arguments.serve is not None:
        print(json.dumps(measured(*MODELS[arguments.serve], number, rounds)))
        return
    print(f"{os.cpu_count()} cores; ms a step, medians of {rounds} rounds in turn")
    print(f"{'':32} {'1':>8} {number:>8} {'ratio':>8}")
    for name in arguments.models:
        flags = [f"--steps_per_call={number}", f"--rounds={rounds}", "--serve", name]
        command = [sys.executable, __file__, *flags]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds = json.loads(done.stdout.splitlines()[-1])
        pairs = zip(seconds["several"], seconds["one"], strict=True)
        ratio = statistics.median(several / one for several, one in pairs)
        one, several = (1e3 * statistics.median(times) for times in seconds.values())
        print(f"{name:32} {one:8.2f} {several:8.2f} {ratio:8.2f}")


if __name__ == "__main__":
    main()
