"""Trains the one-billion-word language model.

    python -m models.one_billion_word.train --mesh_shape=layers:2 --steps=300 --logdir=/tmp/lm

Run it again with the same `--logdir` to go on where it stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

# What a shell reports of a program that was interrupted.
_INTERRUPTED = 130
_BAD_INPUT = 2


def _leave(_number: int, _frame: Any) -> NoReturn:
    """Ends the program at once: in the middle of an import an exception might be swallowed."""
    # Not number 2 while native code is held back there, and not `print`, which may be in use.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(_INTERRUPTED)


def main(argv: list[str]) -> NoReturn:
    """Runs, and turns what users can mend into one line."""
    from models.one_billion_word import command_line, console
    from pipemesh.errors import PipemeshError

    console.stand_in()
    try:
        command_line.parse(argv, __doc__)
        code = run(command_line.request())
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except (PipemeshError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = _BAD_INPUT
    sys.exit(code)


def run(request: Any) -> int:
    """Trains as it is asked for; returns the exit code."""
    from models.one_billion_word import about, console
    from models.one_billion_word.corpus import load_corpus
    from models.one_billion_word.logdir import Logdir, latest_checkpoint
    from models.one_billion_word.vocabulary import Vocabulary, load_vocabulary

    settings = request.settings
    corpus = load_corpus(settings.DATA_DIR, settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN)
    with Logdir(request.logdir):
        found = latest_checkpoint(request.logdir)
        there = about.About.read(found) if found else None
        if there:
            there.check_model(request.model, settings, request.logdir)
        with console.waiting("reading the text"):
            data = console.aside(lambda: about.digests(corpus))
        if there:
            if not request.other_text:
                there.check_data(data, request.logdir)
            vocabulary = Vocabulary(there.vocabulary)
        else:
            folder = os.path.join(request.logdir, "vocabulary")
            with console.waiting(f"learning a vocabulary of {settings.VOCAB_SIZE:,} pieces"):
                vocabulary = console.aside(
                    lambda: load_vocabulary(corpus, settings.VOCAB_SIZE, folder)
                )
        mesh = f"{request.mesh} {request.device_type}"
        now = about.About.of(request.model, settings, mesh, data, vocabulary)
        return _train(request, corpus, vocabulary, now, found, there)


def _train(
    request: Any, corpus: Any, vocabulary: Any, now: Any, found: str | None, there: Any
) -> int:
    from models.one_billion_word import about, console
    from models.one_billion_word.request import EVAL_BATCHES

    with console.waiting("loading TensorFlow"):
        _start_devices(request)
        # Only now: TensorFlow reads the number of devices and threads when it starts.
        from lingvo.core import py_utils

        from models.one_billion_word.loop import Loop
        from models.one_billion_word.params import CONFIGURATIONS
        from models.one_billion_word.stage_table import stage_table
        from models.one_billion_word.trainer import Trainer

        config = CONFIGURATIONS[request.model]()
        vars(config).update(vars(request.settings))
    py_utils.SetEagerMode(True)
    keeps_place = there is None or (
        there.data["train"] == now.data["train"]
        and there.settings["batch_size"] == now.settings["batch_size"]
    )
    with console.waiting("making the model"):
        trainer = Trainer(
            config,
            corpus,
            vocabulary,
            request.mesh,
            request.device_type,
            request.logdir,
            now,
            request.eval_batches or EVAL_BATCHES,
            restore=found,
            skip=there.skip if there and keeps_place else None,
        )
    print(
        f"{request.model} on {corpus.name}: {request.mesh}, {config.NUM_MICRO_BATCHES} "
        f"microbatches of {config.BATCH_SIZE // config.NUM_MICRO_BATCHES} x "
        f"{config.SEQUENCE_LENGTH} tokens"
    )
    print(stage_table(config, trainer.task, trainer.devices))
    print(f"evaluation while training: {trainer.sample}")
    if there:
        print(f"going on from {found}")
        if told := about.changes(there.settings, now.settings):
            print(f"settings that changed: {told}")
        if told := about.changes(there.data, now.data):
            print(f"other text, under the vocabulary of the checkpoint: {told}")
        if not keeps_place:
            print("the text is read from its beginning, in the order of epochs to come")
    sys.stdout.flush()
    return Loop(request, trainer, corpus, vocabulary).run()


def _start_devices(request: Any) -> None:
    import tensorflow as tf
    from absl import flags, logging

    from models.one_billion_word.command_line import FlagError
    from pipemesh.lowering.devices import start_cpu_devices

    logging.use_absl_handler()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)
    wanted = request.mesh.num_devices
    if request.device_type == "CPU":
        start_cpu_devices(wanted)
    elif wanted > (found := len(tf.config.list_physical_devices("GPU"))):
        raise FlagError(
            f"--mesh_shape={str(request.mesh)!r} needs {wanted} GPUs, but {found} exist; use a "
            "smaller mesh or --device_type=CPU"
        )


if __name__ == "__main__":
    # Before all else: imports take seconds.
    signal.signal(signal.SIGINT, _leave)
    main(sys.argv)
