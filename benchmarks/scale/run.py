"""Predicts the training of a large language model on 64 to 4,096 devices, from measured costs.

python benchmarks/scale/run.py            # tables, from figures.json beside this file
python benchmarks/scale/run.py --measure  # measures this machine first, and writes figures.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

from pipemesh.commands.main import main as pipemesh
from pipemesh.plan.figures import Figures
from pipemesh.plan.many_devices import Failures, simulate_failures
from pipemesh.text import columns

HERE = pathlib.Path(__file__).resolve().parent
# The models of this project, which are not installed with the library.
sys.path.insert(0, str(HERE.parents[1]))
FIGURES = HERE / "figures.json"
MODEL = "OneBillionWordGPipe32"
DEVICES = "64,128,256,512,1024,2048,4096"
HOUR = 3600.0
# Networks and devices that nobody has here: assumptions, said with the tables.
_ACCELERATORS = [
    *("--host", "8", "--inside", "5e-6,2e11", "--between", "1e-5,2.5e10", "--faster", "2000"),
    *("--storage", "2e9"),
]
CASES = {
    "hosts of this machine's kind, 10 Gbit Ethernet, batches of 4,096 rows": [
        *("--host", "1", "--between", "5e-5,1.25e9", "--storage", "5e8", "--batch_size", "4096"),
    ],
    "accelerators 2,000 times as fast, 80 GB, 8 a host, batches of 4,096 rows": [
        *_ACCELERATORS,
        *("--device_memory", "80e9", "--batch_size", "4096"),
    ],
    "the same, 96 layers, 40 GB, batches of 1,024 rows": [
        *_ACCELERATORS,
        *("--device_memory", "40e9", "--layers", "98", "--batch_size", "1024"),
    ],
}


def formulas() -> None:
    """Young's and Daly's intervals beside the best one, and the goodput beside a simulation."""
    rows = [
        ("between failures", "save", "Young", "Daly", "best", "goodput", "simulated", "by Young")
    ]
    for between, save in (
        (48 * HOUR, 10.0),
        (12 * HOUR, 30.0),
        (3 * HOUR, 60.0),
        (HOUR, 300.0),
        (0.5 * HOUR, 600.0),
    ):
        failures = Failures(between, save, restart=120.0)
        pieces = max(1000, round(20_000 * between / HOUR / 48))
        simulated = simulate_failures(failures, failures.best, 20 * pieces, num_devices=64)
        rows.append(
            (
                f"{between / HOUR:g} h",
                f"{save:g} s",
                f"{failures.young:,.0f} s",
                f"{failures.daly:,.0f} s",
                f"{failures.best:,.0f} s",
                f"{failures.goodput(failures.best):.2%}",
                f"{simulated.goodput:.2%}",
                f"{failures.goodput(failures.young):.2%}",
            )
        )
    print("\n".join(columns(rows, left=())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure this machine first")
    parser.add_argument("--figures", default=str(FIGURES))
    parser.add_argument("--failure-hours", default="50000", help="of a device")
    arguments = parser.parse_args()
    path = pathlib.Path(arguments.figures)
    if arguments.measure:
        # It loads TensorFlow.
        from measure import measure

        # On one line: the blocks are alike, and a person reads the tables.
        figures = json.dumps(json.loads(measure(MODEL).to_json()), separators=(",", ":"))
        path.write_text(f"{figures}\n", encoding="utf-8")
    if not path.exists():
        parser.error(
            f"there is no {path}: give --measure, which measures {MODEL} on this machine in some "
            "minutes, or --figures=benchmarks/plan/dense.json for a small model"
        )
    figures = Figures.from_json(path.read_text(encoding="utf-8"), str(path))
    print(f"figures: {figures.about}")
    for layer in (figures.layers[0], figures.layers[1], figures.layers[-1]):
        print(
            f"  {layer.name}: forward {layer.takes('F', 1):.3f} s, backward "
            f"{layer.takes('B', 1):.3f} s a row, {layer.parameter_bytes / 1e6:.0f} MB of weights"
        )
    for name, options in CASES.items():
        print(f"\n{name}")
        begin = time.perf_counter()
        words = ["scale", str(path), "--devices", DEVICES, *options, "--parts"]
        words += ["--failure_hours", arguments.failure_hours]
        code = pipemesh(words)
        if code:
            raise SystemExit(code)
        print(f"({time.perf_counter() - begin:.0f} s)")
    print("\ncheckpoints and failures; 120 s to go on after one")
    formulas()


if __name__ == "__main__":
    main()
