"""Trains the one-billion-word language model.

    python -m models.one_billion_word.train --mesh_shape=layers:2 --steps=300 --logdir=/tmp/lm

Run it again with the same `--logdir` to go on where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

# As `models.command` has it, which takes time to import.
_INTERRUPTED = 130


def _leave(_number: int, _frame: Any) -> NoReturn:
    """Ends the program at once: in the middle of an import an exception might be swallowed."""
    # Not number 2 while native code is held back there, and not `print`, which may be in use.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(_INTERRUPTED)


def _end(code: int) -> NoReturn:
    """Ends the program at once: the system frees all memory, which takes Python seconds."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(argv: list[str]) -> NoReturn:
    """Runs, and turns what users can mend into one line."""
    from models import command
    from models.one_billion_word import command_line, console

    def program() -> int:
        command_line.parse(argv, __doc__)
        if taken := command_line.take_up():
            flags = " ".join(f"--{name}={value}" for name, value in taken.items())
            print(f"as it was begun: {flags}")
        return run(command_line.request())

    console.stand_in()
    sys.exit(command.exit_code(program))


def run(request: Any) -> int:
    """Trains as it is asked for; returns the exit code."""
    from models.config import as_toml
    from models.one_billion_word import about
    from pipemesh.checkpoint import Folder
    from pipemesh.checkpoint.whole_file import remove_unfinished, write_whole

    with Folder(request.logdir):
        remove_unfinished(os.path.join(request.logdir, "vocabulary"), "vocab-*.model")
        text = read_text(request)
        trainer, choice = make_trainer(request, text)
        config, there, now = request.settings, text.there, trainer.about
        plan = config.PLAN
        if config.PIPELINED:
            size = config.BATCH_SIZE // plan.num_microbatches
            how = f"{plan.num_microbatches} microbatches of {size}"
            if plan.num_replicas > 1:
                how = f"{how} ({size // plan.num_replicas} a replica)"
        else:
            how = f"no pipeline, {config.BATCH_SIZE}"
        print(
            f"{request.model} on {text.corpus.name}: {plan.mesh}, {how} x "
            f"{config.SEQUENCE_LENGTH} tokens"
        )
        if choice:
            print(f"chosen: {choice}")
        print(f"plan: {plan}")
        print(trainer.stage_table())
        print(f"evaluation while training: {trainer.sample}")
        if there:
            print(f"going on from {trainer.restored}")
            if told := there.changes(now):
                print(f"settings that changed: {told}")
            if told := about.changes(there.data, now.data):
                print(f"other text, under the vocabulary of the checkpoint: {told}")
            if not _keeps_place(there, now):
                print("the text is read from its beginning, in the order of epochs to come")
        sys.stdout.flush()
        from models.one_billion_word.loop import Loop

        # To be given to --config.
        path = os.path.join(request.logdir, "config.toml")
        write_whole(path, as_toml(request.given).encode())
        return Loop(request, trainer, text.corpus, text.vocabulary).run()


class Text(NamedTuple):
    """What is trained on, and the checkpoint to go on from.

    Attributes:
        corpus: the text.
        data: its digests.
        vocabulary: its vocabulary, or that of the checkpoint.
        found: path of the checkpoint; None to begin.
        there: what is noted beside it.
    """

    corpus: Any
    data: Any
    vocabulary: Any
    found: str | None
    there: Any


def read_text(request: Any) -> Text:
    """Finds the text and its vocabulary, without TensorFlow."""
    from models.one_billion_word import about, console
    from models.one_billion_word.corpus import load_corpus
    from models.one_billion_word.vocabulary import Vocabulary, load_vocabulary
    from pipemesh.checkpoint import newest_whole

    settings = request.settings
    corpus = load_corpus(settings.DATA_DIR, settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN)
    found, manifest = newest_whole(request.logdir) or (None, None)
    there = about.About.from_note(manifest.note) if manifest else None
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
            vocabulary = console.aside(lambda: load_vocabulary(corpus, settings.VOCAB_SIZE, folder))
    return Text(corpus, data, vocabulary, found, there)


def make_trainer(request: Any, text: Text) -> tuple[Any, Any]:
    """Starts TensorFlow and makes the model.

    Args:
        request: what is asked for; its settings get what is chosen.
        text: what is trained on.

    Returns:
        The trainer, and the choice that was made; None if there was nothing to choose.
    """
    from models.one_billion_word import about, console
    from models.one_billion_word.request import EVAL_BATCHES

    settings, there, device_type = request.settings, text.there, request.device_type

    def now() -> about.About:
        noted = about.About.of(request.model, settings, device_type, text.data, text.vocabulary)
        return dataclasses.replace(noted, flags=request.given)

    with console.waiting("loading TensorFlow"):
        _start_devices(request)
        # Only now: TensorFlow reads the number of devices and threads when it starts.
        from lingvo.core import py_utils

        from models.one_billion_word.params import CONFIGURATIONS, stage_flops_of
        from models.one_billion_word.trainer import Trainer

        config = CONFIGURATIONS[request.model]()
        vars(config).update(vars(settings))
    choice = None
    if there and settings.CHOSEN:
        # Bit for bit only what is computed in the same way goes on.
        settings.CHOSEN = there.keep_choice(now(), settings)
        vars(config).update(vars(settings))
    if settings.CHOSEN:
        choice = _choose(request, stage_flops_of(config))
        settings.PLAN = choice.plan
        vars(config).update(vars(settings))
    described = now()
    py_utils.SetEagerMode(True)
    with console.waiting("making the model"):
        trainer = Trainer(
            config,
            text.corpus,
            text.vocabulary,
            device_type,
            request.logdir,
            described,
            request.eval_batches or EVAL_BATCHES,
            restore=text.found,
            keeps_place=there is not None and _keeps_place(there, described),
            keep=(request.max_to_keep, request.keep_best),
        )
    return trainer, choice


def _keeps_place(there: Any, now: Any) -> bool:
    return (
        there.data["train"] == now.data["train"]
        and there.settings["batch_size"] == now.settings["batch_size"]
    )


def _choose(request: Any, stage_flops: Sequence[float]) -> Any:
    from models.one_billion_word.choice import choose, memory_of_cpu_device

    available = None
    if request.device_type == "CPU":
        available = memory_of_cpu_device(request.plan.mesh.num_devices)
    return choose(request.settings, stage_flops, request.device_type, available)


def _start_devices(request: Any) -> None:
    from absl import flags, logging

    from models.command import start_devices
    from pipemesh.backend.devices import prepare_graphs_quickly

    logging.use_absl_handler()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)
    prepare_graphs_quickly()
    start_devices(request.plan.mesh, request.device_type)


if __name__ == "__main__":
    # Before all else: imports take seconds.
    signal.signal(signal.SIGINT, _leave)
    # Until the first step little is garbage, and to look for it takes an eighth of the time.
    gc.disable()
    try:
        main(sys.argv)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            # Python writes it.
            raise
        _end(end.code or 0)
