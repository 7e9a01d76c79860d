"""Trains a registered model of lingvo, pipelined or not.

    pipemesh train --model=package.module.Class --mesh_shape=layers:2 --logdir=runs/a

Run it again with the same `--logdir` to go on where it stopped; flags that are not given are those
that the training was begun with.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from pipemesh.checkpoint import Folder, newest_whole
from pipemesh.checkpoint.files import remove_unfinished, write_whole
from pipemesh.checkpoint.lock import check_held
from pipemesh.partition.text import count_text
from pipemesh.training.command import host_flags, model_flags, quiet, training_flags
from pipemesh.training.command.config import as_toml
from pipemesh.training.command.flags import FLAGS, parse
from pipemesh.training.run import console
from pipemesh.training.run.options import Options


def main(argv: list[str]) -> int:
    """Trains as the flags say.

    Args:
        argv: the program and its arguments.

    Returns:
        The exit code.

    Raises:
        PipemeshError: what is asked for cannot be had.
    """
    quiet.install()
    program = sys.modules[__name__]
    # Not when this module is imported: a process has flags of one program.
    model_flags.define()
    training_flags.define()
    parse(argv, program, __doc__)
    host_flags.go_on_by_itself()
    folder = model_flags.logdir()
    with console.objects_alone(training_flags.FLAGS.log_format == "json"):
        training_flags.take_up(folder, program)
        with Folder(folder):
            return _train(folder)


def _train(folder: str) -> int:
    remove_unfinished(folder, "config.toml")
    path, manifest = newest_whole(folder) or (None, None)
    if manifest:
        model_flags.check_note(manifest.note, folder)
    given = training_flags.given(sys.modules[__name__])
    subject = model_flags.subject()
    if subject.most_steps is not None:
        if not FLAGS["steps"].present:
            FLAGS["steps"].value = subject.most_steps
        elif FLAGS.steps != subject.most_steps:
            print(f"--steps={FLAGS.steps} in place of p.train.max_steps={subject.most_steps}")
    options = Options(logdir=folder, given=given, **training_flags.options())
    with console.waiting("making the model"):
        from pipemesh.training.trainer import Trainer

        subject.given = given
        now = subject.note()
        there: Any = manifest.note if manifest else {}
        place = _settings(there, "input.") == _settings(now, "input.")
        trainer = Trainer(subject, options, restore=path, keeps_place=place)
    plan = subject.plan
    print(f"{subject.name}: {plan.mesh}")
    if table := trainer.stage_table():
        print(f"plan: {plan}\n{table}")
    print(f"evaluation while training: {trainer.sample}")
    if manifest:
        print(f"going on from {trainer.restored}")
        for told in _changes(there, now):
            print(told)
        if not trainer.keeps_place:
            print("the data is read from its beginning")
    elif not trainer.is_restorable:
        print("a place in this data cannot be saved: who goes on reads it from its beginning")
    sys.stdout.flush()
    return carry_out(trainer, options)


def carry_out(trainer: Any, options: Options) -> int:
    """Trains, or tries learning rates.

    Args:
        trainer: a `Trainer`, made with the options.
        options: what is asked for.

    Returns:
        The exit code.
    """
    if options.find_learning_rate:
        from pipemesh.training.run.range_test import RangeTest

        return RangeTest(trainer, options).run()
    from pipemesh.training.run.loop import Loop

    for told in without_effect(options):
        print(told, file=sys.stderr)
    # To be given to --config.
    path, config = os.path.join(options.logdir, "config.toml"), as_toml(options.given).encode()
    write_whole(path, config)

    def renew() -> None:
        # The folder was removed, and what is in its place may be another training's.
        check_held(options.logdir)
        write_whole(path, config)

    return Loop(trainer, options, renew).run()


def without_effect(options: Options) -> Iterator[str]:
    """Says which flags change nothing in a training of so many steps, a line each.

    Args:
        options: what is asked for.

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


def _settings(note: Any, prefix: str) -> dict[str, str]:
    found = note.get("settings", {})
    return {name: value for name, value in found.items() if name.startswith(prefix)}


def _changes(there: Any, now: Any) -> list[str]:
    """What is otherwise now than in a checkpoint's note, a line each."""
    found = []
    for what in ("plan", "settings"):
        old, new = there.get(what, {}), now[what]
        for name in {**old, **new}:
            before, after = old.get(name) or "none", new.get(name) or "none"
            if before != after:
                found.append(f"changed: {name} {before} there, {after} now")
    return found
