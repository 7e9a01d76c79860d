"""The commands that run a model on data: `pipemesh train`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.folder import check_held, lost_run
from pipemesh.commands import judge, process, workers
from pipemesh.commands.flags import FLAGS, Command, ConfigError, Flag, as_toml, parse, read_toml
from pipemesh.commands.model_kind import (
    CHECKPOINT_FLAG,
    CONFIG_FILE,
    REGISTERED,
    ModelKind,
    check_flags,
    kind_called,
    named,
    note_of,
)
from pipemesh.commands.texts import line_of
from pipemesh.commands.training_flags import OF_TRAINING, check_trains, newest_note, take_up
from pipemesh.errors import CheckpointError
from pipemesh.plan.figures import settings_of
from pipemesh.text import count_text
from pipemesh.training.run import Options, console

_ABOUT_TRAIN = """\
Trains a registered model of lingvo, pipelined or not.

    pipemesh train --model=package.module.Class --mesh_shape=layers:2 --logdir=runs/a

Run it again with the same `--logdir` to resume; flags that are not given are taken from the
training's checkpoint.
"""

_ABOUT_EVALUATE = """\
Evaluates a checkpoint on one epoch of the held-out data.

    pipemesh evaluate --logdir=runs/a --dataset=Test
    pipemesh evaluate --logdir=runs/gpt2 --text=book.txt

With --text, it prints the perplexity of a file by a model that scores texts: windows move over the
file, and each token but the first is scored once. Words are what stands between white space.

Flags that are not given are taken from the checkpoint; the mesh may be another. A training in the
same folder may run meanwhile.
"""

_ABOUT_PREDICT = """\
Writes the predictions of a trained model for each held-out example.

    pipemesh predict --logdir=runs/a --dataset=Test

Standard output has a line of JSON for each example: what `ComputePredictions` of the task returns,
as far as it has a row an example. Flags that are not given are taken from the checkpoint; the mesh
may be another.
"""


def train(argv: list[str], kind: ModelKind = REGISTERED, about: str | None = _ABOUT_TRAIN) -> int:
    """Trains a model of a kind as the flags say; returns the exit code."""
    process.import_quietly()
    parse(argv, Command(argv[0], about, kind.flags))
    workers.go_on_by_itself()
    folder = kind.logdir()
    with console.objects_alone(FLAGS.log_format == "json"):
        first, note = newest_note(folder)
        take_up(folder, first and lost_run(first, _has_changed(folder, note)))
        check_trains()
        with kind.training() as (trainer, options):
            sys.stdout.flush()
            return carry_out(trainer, options)


def _has_changed(folder: str, note: Mapping[str, Any]) -> bool:
    """Returns whether the last run in a folder trained other weights than a checkpoint's note says,
    or in another way.
    """
    with contextlib.suppress(ConfigError):
        last = read_toml(os.path.join(folder, CONFIG_FILE))
        return settings_of(last) != settings_of(note.get("flags", {}))
    return False


def carry_out(trainer: Any, options: Options) -> int:
    """Trains, or tries learning rates; returns the exit code."""
    if options.find_learning_rate:
        from pipemesh.training.run.range_test import RangeTest

        return RangeTest(trainer, options).run()
    from pipemesh.training.run.loop import Loop

    for line in without_effect(options):
        print(line, file=sys.stderr)
    path, config = os.path.join(options.logdir, CONFIG_FILE), as_toml(options.given).encode()
    write_whole(path, config)

    def renew() -> None:
        # The folder was removed, and what is in its place may be another training's.
        check_held(options.logdir)
        write_whole(path, config)

    return Loop(trainer, options, renew).run()


def without_effect(options: Options) -> Iterator[str]:
    """Returns a line for each flag that changes nothing, or ends, in a training of so many
    steps.
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
    end = options.given.get("decay_steps")
    if end is not None and options.steps > end:
        yield (
            f"--decay_steps={end}: beyond that step, {until}, the learning rate stays at its last "
            f"value; give --decay_steps={options.steps} to let it fall until the end"
        )
    if options.keep_best and 0 <= last < math.lcm(options.eval_every, options.save_every):
        yield (
            f"--keep_best={options.keep_best} has no effect: {until}, no step is both saved "
            f"(--save_every={options.save_every}) and judged (--eval_every={options.eval_every})"
        )


def evaluate(
    argv: list[str], kind: ModelKind | None = None, about: str | None = _ABOUT_EVALUATE
) -> int:
    """Evaluates as the flags say, by default a model of the kind that the checkpoint names."""
    process.import_quietly()
    if "text" in named(argv):
        return judge.perplexity(argv, about)
    name = note_of(argv).get("evaluated_by")
    kind = kind or (kind_called(name) if name else REGISTERED)
    told = "evaluating with the flags of {path}"
    subject, path = requested(argv, kind, about, told, judge.PERPLEXITY_FLAGS)
    from pipemesh.training import evaluation

    with console.waiting("evaluating"):
        step, score = evaluation.evaluate(subject, path)
    for counts in subject.data_counts(heldout=True):
        print(f"held-out data: {counts}")
    print(f"{path}, step {step}: {score}")
    return 0


def requested(
    argv: list[str],
    kind: ModelKind,
    help_text: str | None,
    about: str | None,
    flags: tuple[Flag, ...] = (),
) -> tuple[Any, str]:
    """Returns the model that a command line names, and the path of its checkpoint; for `about` see
    `take_up`. `flags` are those of a text, which is not given.
    """
    refused: dict[str, str] = dict.fromkeys(
        (*OF_TRAINING, "elastic", "train_data", "buckets"), "is for training"
    )
    taken = (*kind.flags, CHECKPOINT_FLAG, *flags)
    parse(argv, Command(argv[0], help_text, taken, refused=refused))
    if flags:
        judge.check_without_text()
    check_flags()
    take_up(kind.logdir(), FLAGS.checkpoint, (*OF_TRAINING, "train_data", "buckets"), about)
    return kind.evaluation()


def predict(argv: list[str]) -> int:
    """Predicts as the flags say; returns the exit code."""
    process.import_quietly()
    note = note_of(argv)
    if "decoded_by" in note:
        raise CheckpointError(
            f"the checkpoint is of {note.get('program', 'a model')}, which continues and scores "
            "texts; use pipemesh decode or pipemesh score"
        )
    # Standard output has predictions alone.
    subject, path = requested(argv, REGISTERED, _ABOUT_PREDICT, None)
    from pipemesh.training.evaluation import Predictor

    console.output_matters()
    with console.waiting("making the model"):
        predictor = Predictor(subject, path)
    for number, example in enumerate(predictor.examples()):
        values = {name: _plain(value.tolist()) for name, value in example.items()}
        print(line_of({"number": number, **values}), flush=True)
    if predictor.left_out:
        names = ", ".join(sorted(predictor.left_out))
        print(f"left out, as it has no row for each example: {names}", file=sys.stderr)
    return 0


def _plain(value: Any) -> Any:
    """Converts a value for JSON, which knows no infinity, with all digits of float32."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None
