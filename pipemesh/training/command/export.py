"""Writes a trained language model as a SavedModel, which TensorFlow loads without this library.

    pipemesh export --logdir=runs/OneBillionWordTiny --to=exported

It has the signatures `score` and `decode` (greedy); `pipemesh.decoding.ExportedModel` says what
they take and return.
"""

from __future__ import annotations

import os
from typing import Any

from absl import flags

from pipemesh.checkpoint.paths import is_pattern
from pipemesh.training.command import quiet
from pipemesh.training.command.decode import Tokens, helped, program_of
from pipemesh.training.command.flags import FILES, FlagError, group
from pipemesh.training.command.host_flags import NAMES
from pipemesh.training.command.plan_flags import OF_PIPELINES
from pipemesh.training.command.training_flags import OF_TRAINING

FLAGS = flags.FLAGS

# Flags that play no part: the model is exported for one device.
_OF_PLANS = ("mesh_shape", "layout", *OF_PIPELINES, "strict_devices", *NAMES)

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
    if helped(argv, __doc__, define, {*OF_TRAINING, *_OF_PLANS}):
        return 0
    return program_of(argv).export(argv)


@group(FILES)
def define() -> None:
    """Defines the flags of an export."""
    flags.DEFINE_string("to", None, "The folder to write to, new or empty.")


def folder() -> str:
    """The folder to write to.

    Raises:
        FlagError: there is none, something is in it, or TensorFlow could not load it from there.
    """
    if not FLAGS.to:
        raise FlagError("where to? give --to=FOLDER")
    if is_pattern(FLAGS.to):
        raise FlagError(f"--to={FLAGS.to!r}: TensorFlow loads no model from a path with [ or \\")
    if os.path.exists(FLAGS.to) and (not os.path.isdir(FLAGS.to) or os.listdir(FLAGS.to)):
        raise FlagError(f"--to={FLAGS.to!r} is there already; give a new or an empty folder")
    try:
        os.makedirs(FLAGS.to, exist_ok=True)
    except OSError as error:
        raise _unwritable(error) from error
    return FLAGS.to


def on_one_device() -> None:
    """Asks for the model as it is without a pipeline, whatever it was trained on.

    Raises:
        FlagError: a flag asks for another plan.
    """
    given = [name for name in _OF_PLANS if FLAGS[name].present]
    if given:
        raise FlagError(
            f"--{given[0]} plays no part, since a model is exported for one device; leave it out"
        )
    FLAGS.plain, FLAGS["plain"].present = True, 1
    # Workers in TF_CONFIG are for what is computed.
    FLAGS.cluster = "none"


def export(subject: Any, path: str, tokens: Tokens) -> None:
    """Writes a SavedModel, and says so.

    Args:
        subject: the model, on one device.
        path: of the checkpoint.
        tokens: how it spells text.

    Raises:
        CheckpointError: the checkpoint is another model's, or damaged.
        FlagError: the folder cannot be written to.
    """
    import tensorflow as tf

    from pipemesh.decoding import ExportedModel, Generator, Sampler
    from pipemesh.training.evaluation import restored
    from pipemesh.training.run import console

    to = folder()
    with console.waiting("making the model"):
        trained = restored(subject, path)

    def compute(batch: Any) -> Any:
        with trained.cluster(do_eval=True):
            return trained.evaluate(batch, lambda _, per_example: per_example.xent)

    generator = Generator(
        trained.task,
        trained.pipelines[0],
        lambda: trained.cluster(do_eval=True),
        tokens.length,
        Sampler(),
        tokens.stop,
    )
    with console.waiting("writing"):
        made = ExportedModel(compute, generator, length=tokens.length, vocab_size=tokens.vocab_size)
        try:
            made.save(to)
        except (OSError, tf.errors.OpError) as error:
            raise _unwritable(error) from error
    print(f"{path} is exported to {to}: signatures score and decode, {tokens.length} tokens a row")


def _unwritable(error: Exception) -> FlagError:
    why = getattr(error, "strerror", None) or getattr(error, "message", None) or error
    return FlagError(f"--to={FLAGS.to!r} cannot be written to ({why})")
