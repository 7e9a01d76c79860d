"""Trains a registered model of lingvo, pipelined or not.

    pipemesh train --model=package.module.Class --mesh_shape=layers:2 --logdir=runs/a

Run it again with the same `--logdir` to resume; flags that are not given are taken from the
training's checkpoint.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.folder import check_held
from pipemesh.commands import host_flags, process
from pipemesh.commands.flags import FLAGS, Command, as_toml, parse
from pipemesh.commands.model_kind import REGISTERED, ModelKind
from pipemesh.commands.training_flags import take_up
from pipemesh.text import count_text
from pipemesh.training.run import Options, console


def main(argv: list[str], kind: ModelKind = REGISTERED, about: str | None = __doc__) -> int:
    """Trains a model of a kind as the flags say; returns the exit code.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    process.import_quietly()
    parse(argv, Command(argv[0], about, kind.flags))
    host_flags.go_on_by_itself()
    folder = kind.logdir()
    with console.objects_alone(FLAGS.log_format == "json"):
        take_up(folder)
        with kind.training() as (trainer, options):
            sys.stdout.flush()
            return carry_out(trainer, options)


def carry_out(trainer: Any, options: Options) -> int:
    """Trains, or tries learning rates; returns the exit code."""
    if options.find_learning_rate:
        from pipemesh.training.run.range_test import RangeTest

        return RangeTest(trainer, options).run()
    from pipemesh.training.run.loop import Loop

    for line in without_effect(options):
        print(line, file=sys.stderr)
    # For --config.
    path, config = os.path.join(options.logdir, "config.toml"), as_toml(options.given).encode()
    write_whole(path, config)

    def renew() -> None:
        # The folder was removed, and what is in its place may be another training's.
        check_held(options.logdir)
        write_whole(path, config)

    return Loop(trainer, options, renew).run()


def without_effect(options: Options) -> Iterator[str]:
    """Returns a line for each flag that changes nothing in a training of so many steps.

    Example:
        >>> print(*without_effect(Options(logdir="runs/a", steps=300, early_stop=2)))
        --early_stop=2 has no effect: up to --steps=300, --eval_every=100 gives 2 evaluations; 3 \
are needed
    """
    until = f"up to --steps={options.steps}"
    # The last step is judged after training.
    last = options.steps - 1
    evaluations = last // options.eval_every
    if 0 < options.early_stop and 0 <= evaluations <= options.early_stop:
        yield (
            f"--early_stop={options.early_stop} has no effect: {until}, "
            f"--eval_every={options.eval_every} gives {count_text(evaluations, 'evaluation')}; "
            f"{options.early_stop + 1} are needed"
        )
    if options.keep_best and 0 <= last < math.lcm(options.eval_every, options.save_every):
        yield (
            f"--keep_best={options.keep_best} has no effect: {until}, no step is both saved "
            f"(--save_every={options.save_every}) and judged (--eval_every={options.eval_every})"
        )
