"""The command `pipemesh`: one subcommand a room, each loaded only when it is called.

A subcommand is a module with `add_arguments(parser)` and `run(arguments) -> exit code`; its first
docstring line is its help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pipemesh import __version__
from pipemesh.errors import PipemeshError
from pipemesh.example_models import example
from pipemesh.text import columns, did_you_mean

COMMANDS = {
    "checkpoint": "pipemesh.checkpoint.command",
    "launch": "pipemesh.hosts.launch",
    "partition": "pipemesh.partition.command",
    "plan": "pipemesh.plan.command",
    "report": "pipemesh.report.command",
    "scale": "pipemesh.scale.command",
    "schedule": "pipemesh.schedule.command",
    "worker": "pipemesh.hosts.worker",
}
# Those that train have flags of their own kind: `main(argv) -> exit code`.
PROGRAMS = {
    "decode": "pipemesh.training.command.decode",
    "evaluate": "pipemesh.training.command.evaluate",
    "export": "pipemesh.training.command.export",
    "predict": "pipemesh.training.command.predict",
    "score": "pipemesh.training.command.score",
    "train": "pipemesh.training.command.train",
}
# In the groups of the list of commands: those that need TensorFlow, and those that do not.
HELP = {
    "train": "train a registered model of lingvo, pipelined or not",
    "evaluate": "evaluate a checkpoint on held-out data",
    "predict": "write the model's predictions for held-out examples",
    "decode": "continue texts with a trained model",
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
NEED_TENSORFLOW = frozenset([*PROGRAMS, "checkpoint", "launch", "worker"])
# Commands that read files without TensorFlow load it by themselves where they need it.
_LOAD_IT_LATER = frozenset(["checkpoint"])


class _Parser(argparse.ArgumentParser):
    """A parser that takes `--a_b` for `--a-b` and the other way round, and names near misses."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str], namespace: Any = None
    ) -> Any:
        words = list(args)
        end = words.index("--") if "--" in words else len(words)
        return super().parse_known_args(
            [*map(self._known_spelling, words[:end]), *words[end:]], namespace
        )

    def _known_spelling(self, word: str) -> str:
        name, equals, value = word.partition("=")
        known = self._option_string_actions
        for other in (name.replace("_", "-"), name.replace("-", "_")):
            spelling = f"--{other[2:]}"
            if name.startswith("--") and name not in known and spelling in known:
                return f"{spelling}{equals}{value}"
        return word

    def refuse(self, words: Sequence[str]) -> None:
        """Ends the process if words are left that the command does not know."""
        if words:
            near = did_you_mean(words[0].partition("=")[0], self._option_string_actions)
            hint = f"; {near.rstrip()}" if near else ""
            self.error(f"unknown argument {words[0]!r}{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the words after `pipemesh`; by default those of this process.

    Returns:
        The exit code: 0, or 2 for any mistake in what was asked.

    Example:
        >>> main(["schedule", "--name", "forward_only", "--devices", "1", "--microbatches", "2"])
        forward_only: 1 device, 1 stage, 2 microbatches
        costs a stage: F 1, B 2, I 1, W 1, transfer 0
        <BLANKLINE>
        device 0 |0F0 0F1
        <BLANKLINE>
        makespan 2, bubble 0 (0.0%), largest own-span bubble 0, peak activations 1
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words and not words[0].startswith("-") and words[0] not in HELP:
        hint = did_you_mean(words[0], HELP)
        print(
            f"pipemesh: error: unknown command {words[0]!r}; {hint}known are {', '.join(HELP)}",
            file=sys.stderr,
        )
        return 2
    try:
        if words and words[0] in NEED_TENSORFLOW - _LOAD_IT_LATER:
            importlib.import_module("pipemesh.needs_tensorflow")
        if words and words[0] in PROGRAMS:
            return _run_program(words[0], words[1:])
        return _run_command(words)
    except PipemeshError as error:
        print(f"pipemesh: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, `head` for example, has seen enough; nor may the interpreter write on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_command(words: list[str]) -> int:
    """Runs a command whose arguments argparse reads."""
    parser = _Parser(
        prog="pipemesh",
        usage="pipemesh COMMAND ...",
        description="Pipelined training on a named-dimension mesh.",
        epilog=_list_of_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pipemesh {__version__}")
    commands = parser.add_subparsers(dest="command", help=argparse.SUPPRESS)
    name = words[0] if words and words[0] in COMMANDS else None
    command = parser
    if name is not None:
        # Only the command that is called is imported: the others may need TensorFlow.
        command = commands.add_parser(name, prog=f"pipemesh {name}", allow_abbrev=False)
        module: Any = importlib.import_module(COMMANDS[name])
        command.description = (module.__doc__ or "").strip()
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(
            run=module.run,
            table_of=table_of,
            lingvo_names=lingvo_names,
            weights_of_others=weights_of_others,
            measured=measured,
        )
    arguments, rest = parser.parse_known_args(words)
    command.refuse(rest)
    if name is None:
        parser.print_help(sys.stderr)
        return 2
    if name == "worker":
        # It loads TensorFlow, which announces itself.
        importlib.import_module("pipemesh.training.command.quiet").install()
    code = int(arguments.run(arguments))
    sys.stdout.flush()
    return code


def _list_of_commands() -> str:
    """The commands with what each does, in two groups."""
    lines = columns([[f"  {name}", help] for name, help in HELP.items()], left=(0, 1))
    needing = [line for name, line in zip(HELP, lines, strict=True) if name in NEED_TENSORFLOW]
    pure = [line for name, line in zip(HELP, lines, strict=True) if name not in NEED_TENSORFLOW]
    told = ["commands that train and use models (they need TensorFlow and lingvo):", *needing]
    told += ["", "commands that plan (NumPy is enough, except to measure a model):", *pure]
    return "\n".join([*told, "", "`pipemesh COMMAND --help` describes a command."])


def _run_program(name: str, words: Sequence[str]) -> int:
    """Runs a program that trains, as the process that it is."""
    _look_here()
    program: Any = importlib.import_module("pipemesh.training.command.program")
    main: Any = importlib.import_module(PROGRAMS[name]).main
    return program.run(main, [f"pipemesh {name}", *words])


def table_of(text: str, num_stages: int, num_microbatches: int) -> dict[str, Any]:
    """What `pipemesh.partition.partition` takes of a schedule's table.

    The rooms of partition and schedule do not know each other, so it is done here.

    Args:
        text: the schedule, as in `pipemesh.schedule.names`.
        num_stages: how many stages the table is to have.
        num_microbatches: and how many microbatches.

    Raises:
        ScheduleError: there is no such table.

    Example:
        >>> table_of("zb_v", 4, 4)["stage_devices"]
        (0, 1, 1, 0)
    """
    from pipemesh.schedule import ScheduleSpec, simulate

    table = ScheduleSpec.from_text(text).for_stages(num_stages, num_microbatches)
    return simulate(table).for_partition()


def lingvo_names(
    names: Iterable[str], boundaries: Sequence[int] | None, like: Iterable[str]
) -> dict[str, str]:
    """What tensors are called with lingvo's stages, or without any.

    The room of checkpoints does not know lingvo, so it is done here.

    Args:
        names: of tensors.
        boundaries: of stages; empty for names without stages, None for the stages of `like`.
        like: names of tensors that lingvo wrote.

    Raises:
        PipelineError: no tensor lies in a layer, or in a stage, that could be renamed.
    """
    from pipemesh.layers.lingvo_stages import boundaries_in, with_stages, without_stages

    if boundaries is None:
        boundaries = boundaries_in(like)
    return with_stages(names, boundaries) if boundaries else without_stages(names)


def measured(model: str, num_devices: int, device_type: str) -> Any:
    """A model whose layers and steps can be measured on this machine.

    The room of plans knows no TensorFlow, so it is done here.

    Args:
        model: `package.module.Class`.
        num_devices: that there are.
        device_type: `CPU` or `GPU`.

    Raises:
        PipemeshError: it cannot be.
    """
    importlib.import_module("pipemesh.needs_tensorflow")
    importlib.import_module("pipemesh.training.command.quiet").install()
    _look_here()
    module: Any = importlib.import_module("pipemesh.training.measuring.registered_steps")
    return module.RegisteredSteps(model, num_devices, device_type)


def weights_of_others(arguments: argparse.Namespace) -> int:
    """Takes weights of other programs in, or hands them out.

    The room of checkpoints knows no models, so it is done here.

    Args:
        arguments: of `pipemesh checkpoint import` or `export`.

    Returns:
        The exit code.

    Raises:
        PipemeshError: the weights cannot be read or written, or a package is missing.
    """
    importlib.import_module("pipemesh.needs_tensorflow")
    _look_here()
    module: Any = importlib.import_module(example("pretrained.command"))
    return int(module.run(arguments))


def _look_here() -> None:
    """Finds models in the folder where the command was called, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


if __name__ == "__main__":
    sys.exit(main())
