"""One step of a network that is split over two devices: pipemesh, its peers, and the plain model.

    python benchmarks/mesh/run.py

Each contender has a process of its own, because threads are set once a process. They compute in
turn, one step each a round, while the others wait.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
MESH_TENSORFLOW = "mesh-tensorflow==0.1.21"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import networks  # noqa: E402
from shared.children import start  # noqa: E402

from pipemesh.mesh import Mesh  # noqa: E402

MESHES = ["model:2", "data:2"]
OURS = ["pipemesh placement", "pipemesh SIMD"]
PEERS = ["DTensor", "Mesh TensorFlow"]
# At most so many times as long as the peer takes.
BARS = {"plain": 1.15, "DTensor": 1.0, "Mesh TensorFlow": None}


class Contender:
    def __init__(self, *arguments: str) -> None:
        self._process = start(
            [sys.executable, str(HERE / "contenders.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCHMARK_STDERR") else subprocess.DEVNULL,
            text=True,
        )

    def ask(self, *words: str) -> list[float]:
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ContenderError(f"ended early with exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class ContenderError(Exception):
    """A contender's process has ended."""


def install_mesh_tensorflow() -> None:
    """Installs it into a folder that nothing but its own process looks at."""
    if (HERE / "peers" / "mesh_tensorflow").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(HERE / "peers")]
    done = subprocess.run([*command, MESH_TENSORFLOW], capture_output=True, text=True)
    if done.returncode:
        raise ContenderError(f"cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def start_contenders() -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that compute what they should, and why others are absent."""
    contenders, absent = {}, {}
    wanted = {}
    for name in ["plain", *OURS, *PEERS]:
        try:
            if name == "Mesh TensorFlow":
                install_mesh_tensorflow()
            contender = Contender(name)
            for network in networks.SHAPES:
                for mesh in MESHES:
                    values = contender.ask(network, mesh, "check")
                    expected = wanted.setdefault(network, values)
                    for value, number in zip(values, expected, strict=True):
                        if not abs(value - number) <= 1e-3 * abs(number):
                            raise SystemExit(f"{name}, {network}, {mesh}: {values}, not {expected}")
        except ContenderError as error:
            if name not in PEERS:
                raise SystemExit(f"{name} {error}") from error
            absent[name] = str(error)
        else:
            contenders[name] = contender
    return contenders, absent


def time_steps(contenders: dict[str, Contender], rounds: int) -> dict:
    """By network, mesh and contender: a pair of seconds and CPU seconds for each round."""
    times: dict = {}
    for counted in (False, True):
        for _ in range(rounds if counted else 2):
            for network in networks.SHAPES:
                for mesh in MESHES:
                    for name, contender in contenders.items():
                        pair = contender.ask(network, mesh)
                        if counted:
                            found = times.setdefault(network, {}).setdefault(mesh, {})
                            found.setdefault(name, []).append(pair)
    return times


def ratio(times: dict[str, list], name: str, peer: str) -> float:
    """The median over rounds, whose steps ran one right after the other: so it suffers least from
    what else the machine does."""
    return statistics.median(
        mine / theirs for (mine, _), (theirs, _) in zip(times[name], times[peer], strict=True)
    )


def report_steps(times: dict, absent: dict[str, str]) -> dict:
    ratios: dict = {}
    for network, by_mesh in times.items():
        print(f"\n{networks.TITLES[network]}: forward and backward")
        for mesh, of in by_mesh.items():
            print(
                f"\n{mesh:20} {'median':>8} {'quartiles':>17} {'CPU':>8}  placement / it  SIMD / it"
            )
            for name, pairs in of.items():
                seconds = [1e3 * wall for wall, _ in pairs]
                low, middle, high = statistics.quantiles(seconds, n=4)
                cpu = statistics.median(1e3 * cpu for _, cpu in pairs)
                mine = [ratio(of, own, name) for own in OURS]
                ratios[f"{network}, {mesh}, {name}"] = dict(zip(OURS, mine, strict=True))
                print(
                    f"{name:20} {middle:6.1f}ms {low:7.1f} -{high:6.1f}ms {cpu:6.1f}ms "
                    f"{mine[0]:15.2f} {mine[1]:10.2f}{verdict(name, mine)}"
                )
    for name, why in absent.items():
        print(f"\n{name} is absent: it {why}")
    return ratios


def verdict(name: str, ratios: list[float]) -> str:
    bar = BARS.get(name)
    if bar is None:
        return ""
    words = ["met" if value <= bar else "NOT met" for value in ratios]
    return f"   bar {bar}: {', '.join(words)}"


def measured(what: str) -> list[list]:
    done = subprocess.run(
        [sys.executable, str(HERE / "contenders.py"), what],
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("BENCHMARK_STDERR") else subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def report_build(rows: list[list]) -> None:
    print("\nBuilding a step over the axis 'model'; nodes of the graph and its functions")
    print(f"{'':20} {'devices':>8} {'nodes':>8} {'trace':>8} {'first step':>11}")
    for network, lowering, devices, nodes, traced, first in rows:
        name = f"{network}, {lowering}"
        print(f"{name:20} {devices:8} {nodes:8,} {traced:7.2f}s {first:10.2f}s")


def report_memory(rows: list[list]) -> None:
    side = networks.SIDE
    print(f"\nU-Net of a volume of {side}^3: kept for the backward pass by the device with most")
    print(f"{'mesh':14} {'layout':24} {'bytes':>12} {'of one device':>14} {'1 / devices':>12}")
    for mesh, rules, size in rows:
        share = 1 / Mesh.from_text(mesh).num_devices
        print(f"{mesh:14} {rules:24} {size:12,} {size / rows[0][2]:14.3f} {share:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", default=str(HERE / "result.json"))
    parser.add_argument("--memory", action="store_true", help="print the memory of volumes alone")
    arguments = parser.parse_args()
    memory = measured("memory")
    report_memory(memory)
    if arguments.memory:
        return
    build = measured("build")
    report_build(build)
    contenders, absent = start_contenders()
    times = time_steps(contenders, arguments.rounds)
    for contender in contenders.values():
        contender.close()
    ratios = report_steps(times, absent)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "memory": memory,
        "build": build,
        "seconds_and_cpu_seconds": times,
        "median_ratio": ratios,
        "absent": absent,
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
