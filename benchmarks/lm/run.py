"""Tokens a second of the language model: under plans, of lingvo's, of torch, and the limit."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import ROOT, Contender, serve_timed, take_turns
from shared.mkl_shim import mkl_shim
from shared.products import of_language_model, products_step
from shared.stack import quiet, set_threads
from shared.torch_environment import torch_python, torch_version

sys.path.insert(0, str(ROOT))

REFERENCE, LINGVO, PRODUCTS = "plain", "lingvo's GPipeTransformerLm", "products alone"
MODEL = "--layout=heads:model;d_ff:model;vocab:model"
CONTENDERS = {
    REFERENCE: ["--mesh_shape=layers:1", "--plain"],
    "layers:1": ["--mesh_shape=layers:1"],
    "layers:2": ["--mesh_shape=layers:2"],
    "data:2": ["--mesh_shape=layers:1;data:2", "--layout=batch:data"],
    "model:2": ["--mesh_shape=layers:1;model:2", MODEL],
    "layers:2, 8, full": ["--mesh_shape=layers:2", "--num_microbatches=8", "--remat=full"],
    "lingvo's layers, plain": ["--mesh_shape=layers:1", "--plain", "--layers=lingvo"],
    LINGVO: [],
    PRODUCTS: [],
}
# In eager mode, both threads at each operation.
TORCH, FAST = "torch", "torch, AVX-512"
# Other models, and what is no model.
OTHERS = ["lingvo's layers, plain", LINGVO, PRODUCTS, TORCH, FAST]
# At least so many times as many tokens a second as the other one.
BARS = {
    ("layers:2", REFERENCE): 1.1,
    ("model:2", REFERENCE): 0.9,
    ("data:2", REFERENCE): 1.0,
    ("layers:2", LINGVO): 1.8,
    ("layers:2", PRODUCTS): 0.6,
    ("layers:2", TORCH): 1.15,
    ("layers:2", FAST): 1.15,
}


def request_of(flags: list[str], folder: str):
    """Parses flags of the trainer into a request."""
    from models.one_billion_word import command_line
    from pipemesh.commands.flags import Command, parse

    command = Command("benchmark", None, command_line.FLAGS_OF_TRAINING)
    parse(["benchmark", *flags, f"--logdir={folder}"], command)
    return command_line.request()


def trainer_step(flags: list[str], folder: str):
    """A step of the trainer, which returns the loss."""
    from models.one_billion_word import kind

    request = request_of(flags, folder)
    trainer, _ = kind.make_trainer(request, kind.read_text(request))
    return lambda: (trainer.train_step()["loss"],)


def make_step(name: str, flags: list[str], folder: str, dropout: float):
    """A step of training with these flags; the vocabulary in `folder` is shared."""
    if name == LINGVO:
        from lingvo_lm import lingvo_step

        return lingvo_step(num_microbatches=4, dropout=dropout)
    if name == PRODUCTS:
        quiet()
        set_threads(inter_op=2, intra_op=1, num_devices=2)
        from models.one_billion_word.sizes import Tiny

        # Half of the rows on each of two devices.
        half = of_language_model(Tiny, Tiny.BATCH_SIZE // 2)
        return products_step(half, ["CPU:0", "CPU:1"])
    return trainer_step([*flags, f"--dropout_prob={dropout}"], folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dropout", type=float, default=0.1, help="probability; default: 0.1")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument(
        "--torch",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="also measure torch, of this Python; without one, of an environment made here",
    )
    parser.add_argument(
        "--also", action="append", default=[], help="flags of one more contender, in one argument"
    )
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_timed(make_step(*json.loads(arguments.serve), arguments.folder, arguments.dropout))
        return
    chosen = {name: CONTENDERS[name] for name in (REFERENCE, *arguments.contenders, PRODUCTS)}
    contenders = chosen | {flags: flags.split() for flags in arguments.also}
    given = ["--dropout", str(arguments.dropout)]
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for name, flags in contenders.items():
            serve = json.dumps([name, flags])
            command = [sys.executable, __file__, "--folder", folder, "--serve", serve]
            processes[name] = Contender([*command, *given])
            # The first one learns the vocabulary.
            processes[name].ask()
        if arguments.torch is not None:
            python = torch_python(arguments.torch or None)
            print(f"torch {torch_version(python)}")
            command = [python, str(pathlib.Path(__file__).with_name("torch_lm.py")), *given]
            processes[TORCH] = Contender(command)
            if (shim := mkl_shim()) is not None:
                processes[FAST] = Contender(command, {"LD_PRELOAD": shim})
        seconds, cpu_seconds, _ = take_turns(processes, arguments.rounds, REFERENCE, OTHERS)
    report(seconds, cpu_seconds, arguments)


def report(seconds, cpu_seconds, arguments) -> None:
    from models.one_billion_word.sizes import Tiny

    tokens = Tiny.BATCH_SIZE * Tiny.SEQUENCE_LENGTH
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"OneBillionWordTiny, {tokens} tokens a step, dropout {arguments.dropout:g}; "
        f"{arguments.rounds} rounds in turn"
    )
    print(f"{'':40} {'tokens/s':>9} {'/ plain':>8} {'/ limit':>8} {'CPU a step':>11}")

    def ratio(name: str, other: str) -> float:
        pairs = zip(seconds[name], seconds[other], strict=True)
        return statistics.median(theirs / mine for mine, theirs in pairs)

    paired = {name: ratio(name, REFERENCE) for name in seconds}
    for name in seconds:
        print(
            f"{name:40} {tokens / median[name]:9,.0f} {paired[name]:8.2f} "
            f"{ratio(name, PRODUCTS):8.2f} {1e3 * statistics.median(cpu_seconds[name]):9.0f}ms"
        )
    for (name, other), bar in BARS.items():
        if not seconds.keys() >= {name, other}:
            continue
        found = ratio(name, other)
        verdict = "met" if found >= bar else "NOT met"
        print(f"{name} / {other}, median over rounds: {found:.2f} (bar {bar}: {verdict})")
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
