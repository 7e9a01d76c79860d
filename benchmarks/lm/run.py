"""Tokens a second of the language model: default flags against one stage and the plain model."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "shared"))

from contender import ROOT, Contender, serve_timed, take_turns

sys.path.insert(0, str(ROOT))

DEFAULT = "layers:2"
REFERENCE = "layers:1"
CONTENDERS = {
    "plain": ["--mesh_shape=layers:1", "--plain"],
    REFERENCE: ["--mesh_shape=layers:1"],
    DEFAULT: ["--mesh_shape=layers:2"],
    "layers:2, 8, full": ["--mesh_shape=layers:2", "--num_microbatches=8", "--remat=full"],
}
BAR = 1.05


def make_step(flags: list[str], folder: str):
    """A step of training with these flags; the vocabulary in `folder` is shared."""
    from models.one_billion_word import command_line, train

    command_line.parse(["train", *flags, f"--logdir={folder}"], "")
    request = command_line.request()
    trainer, _ = train.make_trainer(request, train.read_text(request))
    return lambda: (trainer.train_step()["loss"],)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--also", action="append", default=[], help="flags of one more contender, in one argument"
    )
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_timed(make_step(json.loads(arguments.serve), arguments.folder))
        return
    contenders = CONTENDERS | {flags: flags.split() for flags in arguments.also}
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for name, flags in contenders.items():
            command = [sys.executable, __file__, "--folder", folder, "--serve", json.dumps(flags)]
            processes[name] = Contender(command)
            # The first one learns the vocabulary.
            processes[name].ask()
        seconds, cpu_seconds, _ = take_turns(processes, arguments.rounds, "plain")
    report(seconds, cpu_seconds, arguments)


def report(seconds, cpu_seconds, arguments) -> None:
    from models.one_billion_word.sizes import Tiny

    tokens = Tiny.BATCH_SIZE * Tiny.SEQUENCE_LENGTH
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"OneBillionWordTiny, {tokens} tokens a step; {arguments.rounds} rounds in turn")
    print(f"{'':40} {'tokens/s':>9} {'/ layers:1':>11} {'CPU a step':>11}")
    paired = {}
    for name, times in seconds.items():
        paired[name] = statistics.median(
            theirs / mine for mine, theirs in zip(times, seconds[REFERENCE], strict=True)
        )
        print(
            f"{name:40} {tokens / median[name]:9,.0f} {paired[name]:11.2f} "
            f"{1e3 * statistics.median(cpu_seconds[name]):9.0f}ms"
        )
    verdict = "met" if paired[DEFAULT] >= BAR else "NOT met"
    print(
        f"{DEFAULT} / {REFERENCE}, median over rounds: {paired[DEFAULT]:.2f} (bar {BAR}: {verdict})"
    )
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "paired_ratio": paired,
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
