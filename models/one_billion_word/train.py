"""Trains the one-billion-word language model.

    python -m models.one_billion_word.train --mesh_shape=layers:2 --steps=300 --logdir=/tmp/lm

Run it again with the same `--logdir` to go on where it stopped.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipemesh.training.command import program


def main(argv: list[str]) -> int:
    """Trains as the flags say; returns the exit code."""
    from pipemesh.training.command import host_flags
    from pipemesh.training.run import console

    from . import command_line

    command_line.parse(argv, __doc__)
    host_flags.go_on_by_itself()
    with console.objects_alone(command_line.FLAGS.log_format == "json"):
        command_line.take_up()
        request = command_line.request()
        return run(request)


def run(request: Any) -> int:
    """Trains as it is asked for; returns the exit code."""
    from pipemesh.checkpoint import Folder, newest_whole
    from pipemesh.checkpoint.files import remove_unfinished
    from pipemesh.training.command.train import carry_out

    from . import about

    with Folder(request.logdir):
        remove_unfinished(os.path.join(request.logdir, "vocabulary"), "vocab-*.model")
        remove_unfinished(request.logdir, "config.toml")
        found, manifest = newest_whole(request.logdir) or (None, None)
        text = read_text(request, found, manifest)
        trainer, choice = make_trainer(request, text)
        config, there, now = request.settings, text.there, trainer.subject.about
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
        return carry_out(trainer, request)


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


def read_text(request: Any, found: str | None = None, manifest: Any = None) -> Text:
    """Finds the text and its vocabulary, without TensorFlow.

    Args:
        request: what is asked for.
        found: path of the checkpoint to go on from; None to begin.
        manifest: of it.
    """
    from pipemesh.training.run import console

    from . import about
    from .corpus import load_corpus
    from .vocabulary import Vocabulary, load_vocabulary

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
    """Starts TensorFlow and makes what is trained.

    Args:
        request: what is asked for; its settings get what is chosen.
        text: what is trained on.

    Returns:
        The subject, and the choice that was made; None if there was nothing to choose.
    """
    from pipemesh.training.command import auto_plan
    from pipemesh.training.run import console

    from . import about, command_line

    settings, there = request.settings, text.there

    def now() -> about.About:
        noted = about.About.of(request.model, settings, device_type, text.data, text.vocabulary)
        return dataclasses.replace(noted, flags=request.given)

    with console.waiting("loading TensorFlow"):
        device_type = _device_type(request)
        _start_devices(request)
        # Only now: TensorFlow reads the number of devices and threads when it starts.
        from lingvo.core import py_utils

        from .params import CONFIGURATIONS, boundaries_of, layer_flops_of
        from .subject import LanguageModelSubject

        # Modules of the trainer are loaded here, where it is said that it takes time.
        importlib.import_module("pipemesh.training.trainer")
        settings.PLAN = command_line.fitting(settings, device_type)
        config = CONFIGURATIONS[request.model]()
        vars(config).update(vars(settings))
    choice = None
    if there and settings.CHOSEN:
        # Bit for bit only what is computed in the same way goes on.
        settings.CHOSEN = there.keep_choice(now(), settings)
        vars(config).update(vars(settings))
    if settings.CHOSEN:
        choice = _choose(request, layer_flops_of(config), boundaries_of(config))
        settings.PLAN = choice.plan
        vars(config).update(vars(settings))
    auto_plan.check_memory(settings.PLAN, request.logdir)
    py_utils.SetEagerMode(True)
    return LanguageModelSubject(config, text.corpus, text.vocabulary, device_type, now()), choice


def make_trainer(request: Any, text: Text) -> tuple[Any, Any]:
    """Starts TensorFlow and makes the model, as `make_subject`.

    Returns:
        The trainer, and the choice that was made; None if there was nothing to choose.
    """
    from pipemesh.training.run import console

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
    from pipemesh.training.command.host_flags import start_tensorflow

    start_tensorflow(request.plan.mesh, _device_type(request))


def _device_type(request: Any) -> str:
    from pipemesh.training.command.flags import device_type

    return request.device_type or device_type(request.plan.mesh.num_devices)


if __name__ == "__main__":
    program.run(main)
