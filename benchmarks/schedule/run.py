"""The schedules against each other, and the speed of the simulator.

    python benchmarks/schedule/run.py

Prints two tables and writes result.json next to this file.
"""

import json
import platform
import time
from pathlib import Path

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, list_schedule, simulate, zb_h1
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.names import NAMES

# Costs of one device's share of the model. The ratios of "transformer" are typical of a large
# language model: weight gradients lack the attention part of the backward pass.
CASES = {
    "equal": (4, 8, Costs()),
    "equal, many": (8, 32, Costs()),
    "transformer": (8, 24, Costs(1.0, input_grad=1.0, weight_grad=0.5, transfer=0.03)),
    "slow last": (4, 16, Costs([1, 1, 1, 1.5], transfer=0.05)),
    "slow first": (4, 16, Costs([1.5, 1, 1, 1], transfer=0.05)),
    "uneven": (
        8,
        16,
        Costs([1, 1.3, 0.8, 1, 1.2, 0.9, 1, 1.4], weight_grad=0.6, transfer=0.1),
    ),
    "slow links": (8, 16, Costs(transfer=0.5)),
    "few": (8, 8, Costs(1.0, input_grad=1.2, weight_grad=0.8, transfer=0.1)),
}


def schedules():
    rows = []
    for case, (num_devices, num_microbatches, costs) in CASES.items():
        for name in BUILDERS:
            if not NAMES[name].trains:
                continue
            share = NAMES[name].stages_a_device
            fine = costs.refined(share)
            try:
                rival = simulate(build(name, num_devices, num_microbatches), fine)
            except ScheduleError:
                continue
            begin = time.perf_counter()
            found = simulate(
                list_schedule(fine, num_devices, num_microbatches, rival.peak_activations, share),
                fine,
            )
            rows.append(
                {
                    "case": case,
                    "schedule": name,
                    "peak": max(rival.peak_activations) / share,
                    "bubble": rival.bubble_ratio,
                    "makespan": rival.makespan,
                    "list_schedule": found.makespan,
                    "gain": 1 - found.makespan / rival.makespan,
                    "seconds": time.perf_counter() - begin,
                }
            )
            assert found.makespan <= rival.makespan + 1e-9
    return rows


def bounds():
    """Returns what is found for two equal stages a device, and its bound, for several limits."""
    rows = []
    for held in range(3, 9):
        begin = time.perf_counter()
        found = simulate(list_schedule(Costs().refined(2), 8, 32, 2 * held, 2), Costs().refined(2))
        rows.append(
            {
                "held": held,
                "makespan": found.makespan,
                "bound": found.lower_bound,
                "above": found.above_bound,
                "seconds": time.perf_counter() - begin,
            }
        )
    return rows


def speed():
    schedule = zb_h1(64, 512)
    costs = Costs(transfer=0.1)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        simulate(schedule, costs)
        seconds.append(time.perf_counter() - begin)
    return {"actions": sum(map(len, schedule.rows)), "seconds": min(seconds)}


def main():
    rows = schedules()
    print(
        "| case | schedule | holds | bubble | makespan | list_schedule | shorter by | search, s |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['case']} | {row['schedule']} | {row['peak']:.4g} | {row['bubble']:.1%} "
            f"| {row['makespan']:.2f} | {row['list_schedule']:.2f} | {row['gain']:.1%} "
            f"| {row['seconds']:.2f} |"
        )
    proved = bounds()
    print("\nTwo equal stages a device, 8 devices, 32 microbatches:\n")
    print(
        "| holds | list_schedule | no schedule is below | at most above the optimum | search, s |"
    )
    print("|--:|--:|--:|--:|--:|")
    for row in proved:
        print(
            f"| {row['held']} | {row['makespan']:.1f} | {row['bound']:.1f} | {row['above']:.2%} "
            f"| {row['seconds']:.2f} |"
        )
    fast = speed()
    print(
        f"\nsimulate, zb_h1, 64 devices x 512 microbatches, {fast['actions']} actions: "
        f"{fast['seconds']:.3f} s"
    )
    result = {"machine": platform.platform(), "schedules": rows, "bounds": proved, "simulate": fast}
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
