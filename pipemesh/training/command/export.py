"""Writes a trained language model as a SavedModel, which TensorFlow loads without this library.

    pipemesh export --logdir=runs/OneBillionWordTiny --to=exported

It has the signatures `score` and `decode` (greedy); `pipemesh.decoding.ExportedModel` says what
they take and return.
"""

from __future__ import annotations

import os
from typing import Any

from absl import flags

from pipemesh.checkpoint.files import is_pattern
from pipemesh.training.command import given_texts, quiet
from pipemesh.training.command.decode import Tokens, helped, program_of
from pipemesh.training.command.flags import FILES, FlagError, group
from pipemesh.training.command.host_flags import NAMES
from pipemesh.training.command.plan_flags import OF_PIPELINES

FLAGS = flags.FLAGS

_OF_PLANS = ("mesh_shape", "layout", "allow_idle", *OF_PIPELINES)
_OF_PLANS += ("strict_devices", "trace_schedule", *NAMES)
# What it takes besides its own flags, and why not those of a plan.
TAKEN = frozenset(given_texts.TAKEN).difference(_OF_PLANS, ["ids"])
WHY = dict.fromkeys(_OF_PLANS, "plays no part, since a model is exported for one device")

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()


def main(argv: list[str]) -> int:
    """Exports as the flags say.

    Args:
        argv: the program and its arguments.

    Returns:
        The exit code.

    Raises:
        PipemeshError: what is asked for cannot be had.
    """
    quiet.install()
    if helped(argv, __doc__, define, TAKEN):
        return 0
    return program_of(argv).export(argv)


@group(FILES)
def define() -> None:
    """Defines the flags of an export."""
    flags.DEFINE_string("to", None, "The folder to write to, new or empty.")
    flags.DEFINE_integer(
        "length",
        None,
        "Tokens of a row, prompt and continuation together; default: as many as the model has. "
        "Each row is computed at this length, so a shorter one is quicker and takes less memory.",
        lower_bound=2,
    )


def asked() -> None:
    """Checks the folder, and asks for the model without a pipeline.

    Raises:
        FlagError: the folder cannot be written to.
    """
    _check_folder()
    FLAGS.plain, FLAGS["plain"].present = True, 1
    # Workers in TF_CONFIG are for what is computed.
    FLAGS.cluster = "none"


def _check_folder() -> None:
    """Checks that the folder can be made; it is made when there is something to write.

    Raises:
        FlagError: there is none, something is in it, or TensorFlow could not load it from there.
    """
    if not FLAGS.to:
        raise FlagError("where to? give --to=FOLDER")
    if is_pattern(FLAGS.to):
        raise FlagError(f"--to={FLAGS.to!r}: TensorFlow loads no model from a path with [ or \\")
    if os.path.exists(FLAGS.to) and (not os.path.isdir(FLAGS.to) or os.listdir(FLAGS.to)):
        raise FlagError(f"--to={FLAGS.to!r} is there already; give a new or an empty folder")
    made, path = [], os.path.abspath(FLAGS.to)
    while not os.path.lexists(path):
        made.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(FLAGS.to, exist_ok=True)
        for path in made:
            os.rmdir(path)
    except OSError as error:
        raise _unwritable(error) from error


def export(subject: Any, path: str, tokens: Tokens) -> None:
    """Writes a SavedModel, and says so.

    Args:
        subject: the model, on one device.
        path: of the checkpoint.
        tokens: how it spells text.

    Raises:
        CheckpointError: the checkpoint is another model's, or damaged.
        FlagError: the folder cannot be written to, or the model has fewer tokens a row.
    """
    import tensorflow as tf

    from pipemesh.decoding import ExportedModel, Generator, Sampler
    from pipemesh.training.evaluation import restored
    from pipemesh.training.run import console

    to, length = FLAGS.to, FLAGS.length or tokens.length
    if length > tokens.length:
        raise FlagError(f"--length={length}: the model has {tokens.length} at most; give fewer")
    with console.waiting("making the model"):
        trained = restored(subject, path)

    def compute(batch: Any) -> Any:
        with trained.cluster(do_eval=True):
            return trained.evaluate(batch, lambda _, per_example: per_example.xent)

    generator = Generator(
        trained.task,
        trained.pipelines[0],
        lambda: trained.cluster(do_eval=True),
        length,
        Sampler(),
        tokens.stop,
    )
    with console.waiting("writing"):
        made = ExportedModel(compute, generator, length=length, vocab_size=tokens.vocab_size)
        try:
            made.save(to)
        except (OSError, tf.errors.OpError) as error:
            raise _unwritable(error) from error
    print(f"{path} is exported to {to}: signatures score and decode, {length} tokens a row")


def _unwritable(error: Exception) -> FlagError:
    why = getattr(error, "strerror", None) or getattr(error, "message", None) or error
    return FlagError(f"--to={FLAGS.to!r} cannot be written to ({why})")
