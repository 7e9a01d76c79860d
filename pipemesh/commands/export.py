"""Writes a trained language model as a SavedModel, which TensorFlow loads without this library.

    pipemesh export --logdir=runs/tiny --to=exported

It has the signatures `score` and `decode` (greedy); `pipemesh.decoding.ExportedModel` says what
they take and return.
"""

from __future__ import annotations

import os
from typing import Any

from pipemesh.checkpoint.files import is_pattern
from pipemesh.commands import process
from pipemesh.commands.flags import FILES, FLAGS, Flag, FlagError, grouped
from pipemesh.commands.host_flags import NAMES
from pipemesh.commands.model_kind import Texts
from pipemesh.commands.plan_flags import OF_PIPELINES
from pipemesh.commands.texts import TAKEN, model_of, parse_for_texts
from pipemesh.training.run import console

_OF_PLANS = ("mesh_shape", "layout", "allow_idle", *OF_PIPELINES)
_OF_PLANS += ("strict_devices", "trace_schedule", *NAMES)
EXPORT_FLAGS = grouped(
    FILES,
    Flag("to", value="FOLDER", help="The folder to write to, new or empty; has to be given."),
    Flag(
        "length",
        int,
        least=2,
        help="Tokens of a row, prompt and continuation together; default: the model's maximum. "
        "Each row is computed at this length, so a shorter one is faster and takes less memory.",
    ),
)


def main(argv: list[str]) -> int:
    """Exports as the flags say; returns the exit code.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    process.import_quietly()
    why = dict.fromkeys(_OF_PLANS, "has no effect, since a model is exported for one device")
    taken = {*TAKEN}.difference(_OF_PLANS)
    kind = parse_for_texts("export", argv, __doc__, EXPORT_FLAGS, taken, why)
    _set_plain()
    export(model_of(kind, "export", ()))
    return 0


def _set_plain() -> None:
    """Checks the folder, and sets the flags of a model without a pipeline.

    Raises:
        FlagError: the folder cannot be written to.
    """
    _check_folder()
    FLAGS.set("plain", True)
    # Workers in TF_CONFIG are for computations.
    FLAGS.set("cluster", "none", given=False)


def _check_folder() -> None:
    """Checks that the folder can be made; it is made when there is something to write.

    Raises:
        FlagError: there is none, something is in it, or TensorFlow could not load it from there.
    """
    if not FLAGS.to:
        raise FlagError("the folder to write to is missing; give --to=FOLDER")
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


def export(model: Texts) -> None:
    """Writes a SavedModel, and prints its signatures.

    Raises:
        CheckpointError: the checkpoint is another model's, or damaged.
        FlagError: the folder cannot be written to, or the model has fewer tokens a row.
    """
    import tensorflow as tf

    from pipemesh.decoding import ExportedModel, Generator, Sampler
    from pipemesh.training.evaluation import restored

    subject, path, tokens, _ = model
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
