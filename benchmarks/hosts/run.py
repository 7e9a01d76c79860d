"""A step over two processes against one with the same devices, what is sent, what a loss costs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.children import start
from shared.contender import ROOT, Contender, serve_timed, take_turns

sys.path.insert(0, str(ROOT))

from pipemesh.training.run import READERS
from tests.hosts.namespaces import network

ONE, TWO, UNMARKED = "one process", "two workers", "two workers without marks"
ONE_PROGRAM, TOGETHER = "one process, simd", "two workers, simd"
PLANS = {
    "layers:2": ["--mesh_shape=layers:2"],
    "data:2": ["--mesh_shape=layers:1;data:2", "--layout=batch:data"],
    "model:2": ["--mesh_shape=layers:1;model:2", "--layout=heads:model;d_ff:model;vocab:model"],
}
# As many threads an operation as each device of one process has.
LAUNCH = [
    *(sys.executable, "-m", "pipemesh", "launch", "--processes=2"),
    *("--cpu_devices=2", "--"),
]
TRAIN = [
    *(sys.executable, "-m", "models.one_billion_word.train"),
    *("--num_microbatches=4", "--log_format=json"),
]
SIMD = ["--lowering=simd", "--schedule=gpipe"]
LOST = ["--steps=30", "--save_every=10"]
# The link of the client. The steps of each part of a run, of which every second has that link.
SLOW = "1mbit"
SLOW_PART, SLOW_PARTS = 10, 7
# Between them bytes are counted.
SENT_STEPS = 10, 40


def serve(flags: list[str], folder: str, marks: bool) -> None:
    """Computes a step whenever it is asked to."""
    if not marks:
        import pipemesh.training.trainer

        pipemesh.training.trainer.followed = lambda pipelines: None
    from models.one_billion_word import command_line
    from models.one_billion_word.kind import make_trainer, read_text
    from pipemesh.commands.flags import Command, parse

    words = ["benchmark", *flags, "--num_microbatches=4", f"--logdir={folder}"]
    parse(words, Command("benchmark", None, command_line.FLAGS_OF_TRAINING))
    request = command_line.request()
    trainer, _ = make_trainer(request, read_text(request))
    serve_timed(lambda: (trainer.train_step()["loss"],))
    sys.stdout.flush()
    # Python would wait for what is connected.
    os._exit(0)


def compare(rounds: int) -> dict[str, float]:
    """The median of the rounds' ratios of seconds, by plan."""
    found = {}
    for name, flags in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, *flags, f"--folder={folder}"]
            simd = [*words, *SIMD, "serve"]
            contenders = {
                ONE: Contender([*words, "serve"]),
                TWO: Contender([*LAUNCH, *words, "serve"]),
                UNMARKED: Contender([*LAUNCH, *words, "--no_marks", "serve"]),
            }
            compared = [(ONE, TWO), (UNMARKED, TWO)]
            if name != "layers:2":
                # Its five layers are no two stages of as many.
                contenders[ONE_PROGRAM] = Contender(simd)
                contenders[TOGETHER] = Contender([*LAUNCH, *simd])
                compared.append((ONE_PROGRAM, TOGETHER))
            seconds, _, _ = take_turns(contenders, rounds, reference=ONE)
        for one, two in compared:
            ratios = [b / a for a, b in zip(seconds[one], seconds[two], strict=True)]
            found[f"{name}, {two} / {one}"] = statistics.median(ratios)
            low, _, high = statistics.quantiles(ratios)
            told = f"{statistics.median(ratios):.2f} times {one} ({low:.2f} to {high:.2f})"
            print(f"{name:10} {two}: {told}", flush=True)
    return found


def sent(flags: list[str]) -> dict[str, float]:
    """Bytes a step between two workers, by TCP, those through the client, and what was predicted.

    Of a program for all devices only the sum of gradients is predicted: each parameter is sent to
    the other replica, and its gradient back.
    """
    with tempfile.TemporaryDirectory() as folder:
        first, last = SENT_STEPS
        words = [*TRAIN, *flags, f"--steps={last + 10}", f"--logdir={folder}/run"]
        process = start(
            # No checkpoint in between, which the client fetches.
            [*LAUNCH, *words, "--save_every=1000", "--eval_every=1000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout
        counted, through_client, predicted = {}, {}, 0.0
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "begin" and SIMD[0] in flags:
                    ((names, *rows),) = event["stages"]
                    numbers = [row[names.index("parameters")] for row in rows]
                    predicted = 2 * 4 * sum(int(number.replace(",", "")) for number in numbers)
                if event["event"] == "forecast" and "sent" in event:
                    predicted = sum(each["bytes"] for each in event["sent"])
                if event["event"] == "step" and event["step"] in SENT_STEPS:
                    processes = _children(process.pid)
                    counted[event["step"]] = between = _bytes_between(processes[:2])
                    through_client[event["step"]] = _bytes_between(processes) - between
                    if event["step"] == last:
                        break
        finally:
            # It ends the client and the workers, which would hold the pipes.
            process.terminate()
            process.communicate()
    # Each step is told when it has ended, and so is the next one in part when bytes are counted.
    measured, client = (
        (number[last] - number[first]) / (last - first) for number in (counted, through_client)
    )
    ratio = measured / predicted
    return {"measured": measured, "client": client, "predicted": predicted, "ratio": ratio}


def slow_link() -> dict[str, dict[str, float]]:
    """Seconds a step with a link of `SLOW` to the client, over those with an unlimited one, and its
    bytes a step: by who reads the data. All are hosts with a network of their own.
    """
    figures = {}
    with network(3) as net, contextlib.ExitStack() as stack:
        workers = []
        for host in (2, 3):
            words = ["-m", "pipemesh", "worker", f"--listen={net.address(host)}"]
            command = net.on(host, sys.executable, *words)
            worker = start(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
            stack.callback(worker.kill)
            assert worker.stderr
            while "pipemesh worker:" not in (line := worker.stderr.readline()):
                assert line, "a worker ended"
            workers.append(re.search(r"worker: (\S+:\d+);", line)[1])  # pyright: ignore
        for reader in READERS:
            figures[reader] = _limited(net, 1, ",".join(workers), reader)
    return figures


def _limited(net: Any, host: int, workers: str, reader: str) -> dict[str, float]:
    """The figures of one run, whose link is limited in every second part of it."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counted: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        steps = SLOW_PART * SLOW_PARTS
        words = [*TRAIN, *PLANS["layers:2"], f"--cluster={workers}", f"--read_data={reader}"]
        words += [f"--steps={steps}", "--save_every=10000", "--eval_every=10000"]
        process = start(
            net.on(host, *words, f"--logdir={folder}/run"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout
        try:
            then = bytes_then = 0.0
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] != "step":
                    continue
                part, within = divmod(event["step"], SLOW_PART)
                now, bytes_now = time.monotonic(), _bytes_by(net, host)
                # The first steps build graphs, and those beside a change are of two links.
                if part and within > 1:
                    seconds[part % 2 == 1].append(now - then)
                    if part % 2 == 0:
                        counted.append(bytes_now - bytes_then)
                if part and within == 0:
                    net.limit(host, SLOW if part % 2 == 1 else None)
                then, bytes_then = now, bytes_now
                if event["step"] == steps:
                    break
        finally:
            process.terminate()
            process.communicate()
            net.limit(host, None)
    limited, unlimited = (statistics.median(seconds[is_slow]) for is_slow in (True, False))
    return {
        "unlimited": unlimited,
        "limited": limited,
        "ratio": limited / unlimited,
        "bytes": statistics.median(counted),
    }


def _bytes_by(net: Any, host: int) -> float:
    """Returns the bytes that a host has sent and received."""
    told = json.loads(net.ip(host, "-s -j link show dev eth"))[0]["stats64"]
    return told["rx"]["bytes"] + told["tx"]["bytes"]


def _children(pid: int) -> list[int]:
    """The processes that one has started; of a launcher workers come first."""
    return sorted(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _bytes_between(pids: list[int]) -> int:
    """What processes have sent to each other by TCP, as the system counts it (`ss`)."""
    command = ["ss", "-tinpHO", "state", "established"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, tuple[str, int]] = {}
    owners: dict[str, int] = {}
    for line in lines:
        owner = re.search(r"pid=(\d+)", line)
        ports = re.findall(r"\S+:(\d+)\s", line)[:2]
        bytes_sent = re.search(r"bytes_sent:(\d+)", line)
        if owner and len(ports) == 2 and int(owner[1]) in pids:
            owners["-".join(ports)] = int(owner[1])
            found["-".join(ports)] = (
                "-".join(reversed(ports)),
                int(bytes_sent[1] if bytes_sent else 0),
            )
    return sum(n for there, n in found.values() if owners.get(there))


def lost(number: int) -> dict[str, float]:
    """Seconds from a signal to a worker until it is said, and until the next step is finished."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(
            [*LAUNCH, *TRAIN, *PLANS["layers:2"], *LOST, f"--logdir={folder}/run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout and process.stderr
        try:
            step = 0
            while step < 15:
                step = json.loads(process.stdout.readline()).get("step", 0)
            worker = _children(process.pid)[0]
            begun = time.monotonic()
            os.kill(worker, number)
            noticed = 0.0
            for line in process.stderr:
                if "going on from the last checkpoint" in line:
                    noticed = time.monotonic() - begun
                    break
            if number == signal.SIGSTOP:
                os.kill(worker, signal.SIGCONT)
            while True:
                event = json.loads(process.stdout.readline())
                if event["event"] == "begin":
                    break
            while json.loads(process.stdout.readline())["event"] != "step":
                continue
            return {"noticed": noticed, "next step": time.monotonic() - begun}
        finally:
            # It ends the client and the workers, which would hold the pipes.
            process.terminate()
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--parts", default="ratios,sent,slow_link,lost", help="which of them")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--no_marks", action="store_true", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if rest[-1:] == ["serve"]:
        serve(rest[:-1], arguments.folder, not arguments.no_marks)
        return
    figures: dict[str, Any] = {}
    parts = arguments.parts.split(",")
    if "ratios" in parts:
        figures["ratios"] = compare(arguments.rounds)
    together = {"data:2, simd": [*PLANS["data:2"], *SIMD]}
    for name, flags in {**PLANS, **together}.items() if "sent" in parts else ():
        found = figures[f"sent, {name}"] = sent(flags)
        told = (
            "{measured:,.0f} bytes a step between the two, {ratio:.3f} of {predicted:,.0f}; "
            "{client:,.0f} from and to the client"
        )
        print(f"{name:12} {told.format(**found)}", flush=True)
    for reader, found in slow_link().items() if "slow_link" in parts else ():
        figures[f"slow link, {reader}"] = found
        told = (
            "{unlimited:.3f} s a step, {limited:.3f} s with a link of {link}, {ratio:.2f} times; "
            "{bytes:,.0f} bytes a step"
        )
        print(f"read by {reader:8} {told.format(link=SLOW, **found)}", flush=True)
    signals = (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))
    for name, number in signals if "lost" in parts else ():
        figures[name] = lost(number)
        told = ", ".join(f"{what} after {s:.1f} s" for what, s in figures[name].items())
        print(f"a worker is {name}: {told}", flush=True)
    if arguments.json:
        about = {"machine": platform.platform(), "cores": os.cpu_count(), **figures}
        pathlib.Path(arguments.json).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
