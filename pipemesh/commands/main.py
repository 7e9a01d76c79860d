"""The command `pipemesh`: each subcommand lies in a module beside this one, loaded when called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from pipemesh import __version__
from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS
from pipemesh.text import columns, did_you_mean

# In the groups of the list of commands: those that need TensorFlow, and those that do not.
HELP = {
    "train": "train a registered model of lingvo, pipelined or not",
    "evaluate": "evaluate a checkpoint on held-out data",
    "predict": "write the model's predictions for held-out examples",
    "decode": "continue texts with a trained model",
    "lm_eval": "run tasks of the package lm-eval with a trained language model",
    "score": "compute the log probability and perplexity of texts",
    "export": "write a trained model as a SavedModel of TensorFlow",
    "checkpoint": "inspect, compare, convert, import and export checkpoints",
    "launch": "start workers on this machine, and a command that drives them",
    "worker": "offer the devices of this machine to a client",
    "partition": "cut a stack of layers into stages of equal cost",
    "schedule": "build, compare, simulate and draw pipeline schedules",
    "plan": "find the plans with the shortest steps for a model and some devices",
    "scale": "predict the time and memory of a training on thousands of devices",
    "report": "write the page of a run, or compare several runs",
}
# Commands that share a module, each a function there; others are `main` in a module of their name.
_SHARED = {
    "runs": ("train", "evaluate", "predict"),
    "texts": ("decode", "score", "export"),
    "judge": ("lm_eval",),
    "workers": ("launch", "worker"),
}
MODULES = {name: module for module, names in _SHARED.items() for name in names}
# They own the process: they end it at once, and answer Ctrl-C from the first moment on.
PROGRAMS = _SHARED["runs"] + _SHARED["texts"] + _SHARED["judge"]
NEED_TENSORFLOW = frozenset([*PROGRAMS, "checkpoint", "launch", "worker"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, by default that of this process; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        return process.exit_code(lambda: _help(is_requested=bool(words)))
    name = words[0]
    if name in ("--version", "version"):
        print(f"pipemesh {__version__}")
        return 0
    if name not in HELP:
        known = f"{did_you_mean(name, HELP)}known are {', '.join(HELP)}"
        print(f"error: unknown command {name!r}; {known}", file=sys.stderr)
        return process.BAD_INPUT
    try:
        return process.exit_code(lambda: _run(name, [f"pipemesh {name}", *words[1:]]))
    finally:
        # Of a caller in Python they are no business.
        FLAGS.declare([])


def _run(name: str, argv: list[str]) -> int:
    """Imports a command and runs it; only this one is imported, since others need TensorFlow."""
    # `checkpoint` reads some files without it.
    if name in NEED_TENSORFLOW and name != "checkpoint":
        importlib.import_module("pipemesh.needs_tensorflow")
    if name in PROGRAMS:
        process.look_here()
    module = importlib.import_module(f"pipemesh.commands.{MODULES.get(name, name)}")
    command: Callable[[list[str]], int] = getattr(module, name if name in MODULES else "main")
    if name in PROGRAMS:
        process.run(command, argv)
    return command(argv)


def _help(is_requested: bool) -> int:
    """Prints the list of commands, in two groups; returns the exit code."""
    lines = columns([[f"  {name}", help] for name, help in HELP.items()], left=(0, 1))
    needing = [line for name, line in zip(HELP, lines, strict=True) if name in NEED_TENSORFLOW]
    pure = [line for name, line in zip(HELP, lines, strict=True) if name not in NEED_TENSORFLOW]
    print(
        "usage: pipemesh COMMAND [--flag=value ...]",
        "",
        "Pipelined training on a named-dimension mesh.",
        "",
        "commands that train and use models (they need TensorFlow and lingvo):",
        *needing,
        "",
        "commands that plan (NumPy is enough, except to measure a model):",
        *pure,
        "",
        "`pipemesh COMMAND --help` describes a command; `pipemesh version` prints the version.",
        sep="\n",
        file=sys.stdout if is_requested else sys.stderr,
    )
    return 0 if is_requested else process.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
