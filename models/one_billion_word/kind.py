"""The language model for commands: flags, text, vocabulary, trainer and subject.

Importing it loads no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from pipemesh.checkpoint import Folder, Manifest, newest_whole
from pipemesh.checkpoint.files import remove_unfinished
from pipemesh.commands import training_flags, workers
from pipemesh.commands.model_kind import ModelKind, Texts, Tokens, checkpoint_of
from pipemesh.training.learning import Learning
from pipemesh.training.run import console

from . import about, command_line
from .corpus import load_corpus
from .request import Request
from .vocabulary import Vocabulary, load_vocabulary


class LanguageModelKind(ModelKind):
    """The language model."""

    flags = command_line.FLAGS_OF_TRAINING

    def logdir(self) -> str:
        """Returns `--logdir`, or a folder named after the model."""
        return command_line.logdir()

    def takes(self, command: str) -> Collection[str]:
        """Returns the model's flags that matter for decoding or scoring."""
        sizes = ("layers", "vocab_size", "sequence_length")
        return (*sizes, "batch_size") if command == "score" else sizes

    def training(self) -> contextlib.AbstractContextManager[tuple[Any, Request]]:
        """Makes the trainer, and prints the plan and the changes since the checkpoint."""
        return training_of(command_line.request())

    def evaluation(self) -> tuple[Any, str]:
        """Returns the model, and the path of the checkpoint to evaluate."""
        request = command_line.request()
        path = checkpoint_of(request.logdir)
        subject, _ = make_subject(request, read_text(request, path, Manifest.read(path)))
        return subject, path

    def texts(self, command: str, texts: Sequence[str]) -> Texts:
        """Returns the model for a command on texts."""
        request = command_line.request()
        path = checkpoint_of(request.logdir)
        there = about.About.from_note(Manifest.read(path).note)
        there.check_model(request.model, request.settings, request.logdir)
        settings = request.settings
        if command == "decode":
            # Choices concern how a batch is cut, and decoding has no batch.
            settings.CHOSEN = ()
            settings.PLAN = dataclasses.replace(settings.PLAN, num_microbatches=1)
        words = Vocabulary(there.vocabulary)
        # Unlimited expert capacity keeps a text independent of others in its batch.
        settings.CAPACITY_FACTOR = None
        subject, _ = make_subject(request, Text(None, there.data, words, path, there))
        tokens = Tokens(
            lambda text: [words.bos_id, *words.encode(text)],
            lambda ids: words.decode([token for token in ids if token != words.bos_id]),
            frozenset([words.eos_id]),
            settings.SEQUENCE_LENGTH,
            words.size,
        )
        return Texts(subject, path, tokens, settings.BATCH_SIZE)


KIND = LanguageModelKind()


@contextlib.contextmanager
def training_of(request: Request) -> Iterator[tuple[Any, Request]]:
    """Locks the log directory; yields the trainer for a request, and the request."""
    with Folder(request.logdir):
        yield _trainer(request), request


def _trainer(request: Request) -> Any:
    """Reads the text, makes the trainer, and prints a description of the run."""
    Learning.of(request.settings).check_steps(request.steps)
    remove_unfinished(os.path.join(request.logdir, "vocabulary"), "vocab-*.model")
    remove_unfinished(request.logdir, "config.toml")
    found, manifest = newest_whole(request.logdir) or (None, None)
    text = read_text(request, found, manifest)
    trainer, choice = make_trainer(request, text)
    config, there, now = request.settings, text.there, trainer.subject.about
    plan = config.PLAN
    if config.PIPELINED:
        size = config.BATCH_SIZE // plan.num_microbatches
        noun = "microbatch" if plan.num_microbatches == 1 else "microbatches"
        how = f"{plan.num_microbatches} {noun} of {size}"
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
            print(f"changed since the checkpoint: {told}")
        if told := about.changes(there.data, now.data):
            print(f"other text, under the vocabulary of the checkpoint: {told}")
        if not _keeps_place(there, now):
            print("the text is read from its beginning, in the order of epochs to come")
    return trainer


class Text(NamedTuple):
    """The training text, and the checkpoint to resume from.

    Attributes:
        corpus: the text.
        data: its digests.
        vocabulary: its vocabulary, or that of the checkpoint.
        found: path of the checkpoint; None for a new run.
        there: the note of the checkpoint.
    """

    corpus: Any
    data: Any
    vocabulary: Any
    found: str | None
    there: Any


def read_text(request: Any, found: str | None = None, manifest: Any = None) -> Text:
    """Finds the text and its vocabulary, without TensorFlow."""
    settings = request.settings
    corpus = load_corpus(settings.DATA_DIR, settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN)
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


def make_subject(request: Any, text: Text) -> tuple[Any, Any]:
    """Starts TensorFlow; returns the subject, and the choice that was made or None.

    Chosen values are set in the request's settings.
    """
    settings, there = request.settings, text.there

    def now() -> about.About:
        noted = about.About.of(request.model, settings, device_type, text.data, text.vocabulary)
        return dataclasses.replace(noted, flags=request.given)

    with console.waiting("loading TensorFlow"):
        device_type = _device_type(request)
        _start_devices(request)
        # Import these now: TensorFlow reads the number of devices and threads when it starts.
        from lingvo.core import py_utils

        from .params import CONFIGURATIONS, boundaries_of, layer_flops_of
        from .subject import LanguageModelSubject

        # Load the trainer's modules here, while the user sees that loading takes time.
        importlib.import_module("pipemesh.training.trainer")
        settings.PLAN = command_line.fitting(settings, device_type)
        config = CONFIGURATIONS[request.model]()
        vars(config).update(vars(settings))
    choice = None
    if there and settings.CHOSEN:
        # A resumed run is bit for bit equal only with the same choices.
        settings.CHOSEN = there.keep_choice(now(), settings)
        vars(config).update(vars(settings))
    if settings.CHOSEN:
        choice = _choose(request, layer_flops_of(config), boundaries_of(config))
        settings.PLAN = choice.plan
        vars(config).update(vars(settings))
    training_flags.check_memory(settings.PLAN, request.logdir)
    py_utils.SetEagerMode(True)
    return LanguageModelSubject(config, text.corpus, text.vocabulary, device_type, now()), choice


def make_trainer(request: Any, text: Text) -> tuple[Any, Any]:
    """Starts TensorFlow; returns the trainer, and the choice that was made or None."""
    subject, choice = make_subject(request, text)
    from pipemesh.training.trainer import Trainer

    there = text.there
    place = there is not None and _keeps_place(there, subject.about)
    with console.waiting("making the model"):
        trainer = Trainer(subject, request, restore=text.found, keeps_place=place)
    return trainer, choice


def _keeps_place(there: Any, now: Any) -> bool:
    return (
        there.data["train"] == now.data["train"]
        and there.settings["batch_size"] == now.settings["batch_size"]
    )


def _choose(request: Any, layer_flops: Sequence[float], boundaries: tuple[int, ...]) -> Any:
    from .choice import choose, memory_of_cpu_device

    available = None
    device_type = _device_type(request)
    if device_type == "CPU":
        available = memory_of_cpu_device(request.plan.mesh.num_devices)
    return choose(request.settings, layer_flops, boundaries, device_type, available)


def _start_devices(request: Any) -> None:
    workers.start_tensorflow(request.plan.mesh, _device_type(request))


def _device_type(request: Any) -> str:
    return request.device_type or workers.device_type(request.plan.mesh.num_devices)
