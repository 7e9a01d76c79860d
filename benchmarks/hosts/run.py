"""A step over two processes against one with the same devices, and how long a lost worker costs."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "shared"))

from contender import ROOT, Contender, serve_timed, take_turns

sys.path.insert(0, str(ROOT))

ONE, TWO = "one process", "two workers"
PLANS = {
    "layers:2": ["--mesh_shape=layers:2"],
    "data:2": ["--mesh_shape=layers:1;data:2", "--layout=batch:data"],
    "model:2": ["--mesh_shape=layers:1;model:2", "--layout=heads:model;d_ff:model;vocab:model"],
}
# As many threads an operation as each device of one process has.
LAUNCH = [
    *(sys.executable, "-m", "pipemesh.cli", "launch", "--processes=2"),
    *("--cpu_devices=2", "--"),
]
TRAIN = [
    *(sys.executable, "-m", "models.one_billion_word.train", "--mesh_shape=layers:2"),
    *("--num_microbatches=4", "--steps=30", "--save_every=10", "--log_format=json"),
]


def serve(flags: list[str], folder: str) -> None:
    """Computes a step whenever it is asked to."""
    from models.one_billion_word import command_line
    from models.one_billion_word.train import make_trainer, read_text

    words = ["benchmark", *flags, "--num_microbatches=4", f"--logdir={folder}"]
    command_line.parse(words, None)
    request = command_line.request()
    trainer, _ = make_trainer(request, read_text(request))
    serve_timed(lambda: (trainer.train_step()["loss"],))


def compare(rounds: int) -> dict[str, float]:
    """The median of the rounds' ratios of seconds, by plan."""
    found = {}
    for name, flags in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, *flags, f"--folder={folder}", "serve"]
            contenders = {ONE: Contender(words), TWO: Contender([*LAUNCH, *words])}
            seconds, _, _ = take_turns(contenders, rounds, reference=ONE)
        ratios = [two / one for one, two in zip(seconds[ONE], seconds[TWO], strict=True)]
        found[name] = statistics.median(ratios)
        print(f"{name:10} {found[name]:.2f} times the seconds of one process", flush=True)
    return found


def lost(number: int) -> dict[str, float]:
    """Seconds from a signal to a worker until it is said, and until the next step is finished."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*LAUNCH, *TRAIN, f"--logdir={folder}/run"],
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
            task = f"/proc/{process.pid}/task/{process.pid}/children"
            # The command was started last.
            worker = sorted(map(int, pathlib.Path(task).read_text().split()))[0]
            begun = time.monotonic()
            os.kill(worker, number)
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
            process.kill()
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if rest[-1:] == ["serve"]:
        serve(rest[:-1], arguments.folder)
        return
    figures = {"ratios": compare(arguments.rounds)}
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        figures[name] = lost(number)
        told = ", ".join(f"{what} after {s:.1f} s" for what, s in figures[name].items())
        print(f"a worker is {name}: {told}", flush=True)
    if arguments.json:
        about = {"machine": platform.platform(), "cores": os.cpu_count(), **figures}
        pathlib.Path(arguments.json).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
