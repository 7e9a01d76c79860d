"""Continues texts with the language model, and scores them.

    python -m models.one_billion_word.decode --logdir=runs/OneBillionWordTiny \\
        --prompt="The module" --max_tokens=24

Standard output has the texts and nothing else. Neither plan nor text need be those of the training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from pipemesh.training.command import program

# Flags of the model that play a part when texts are continued or scored.
_OF_MODEL = ("layers", "vocab_size", "sequence_length")


def main(argv: list[str]) -> int:
    """Decodes as the flags say; returns the exit code."""
    from pipemesh.training.command import decode, given_texts

    _parse(argv, __doc__, decode.define, given_texts.TAKEN)
    texts = decode.asked()
    request, path, there = _model(decode.OWN)
    # What is chosen is how a batch is cut, and there is none.
    settings = request.settings
    settings.CHOSEN, settings.PLAN = (), dataclasses.replace(settings.PLAN, num_microbatches=1)
    subject, tokens = _subject(request, path, there)
    decode.decode(subject, path, tokens, texts)
    return 0


def score(argv: list[str]) -> int:
    """Scores as the flags say; returns the exit code."""
    from pipemesh.training.command import given_texts, score

    _parse(argv, score.__doc__, score.define, (*score.TAKEN, "batch_size"))
    texts = given_texts.read("scored")
    request, path, there = _model()
    subject, tokens = _subject(request, path, there)
    score.score(subject, path, tokens, request.settings.BATCH_SIZE, texts)
    return 0


def export(argv: list[str]) -> int:
    """Exports as the flags say; returns the exit code."""
    from pipemesh.training.command import export

    _parse(argv, export.__doc__, export.define, export.TAKEN, export.WHY)
    export.asked()
    request, path, there = _model()
    subject, tokens = _subject(request, path, there)
    export.export(subject, path, tokens)
    return 0


def _parse(
    argv: list[str],
    about: str | None,
    define: Callable[[], None],
    taken: Collection[str],
    why: Mapping[str, str] = MappingProxyType({}),
) -> None:
    from pipemesh.training.command.evaluate import check_flags, define_checkpoint
    from pipemesh.training.command.flags import define_for

    from . import command_line

    own = define_for(command_line, define, define_checkpoint)
    command_line.parse(argv, about, {*own, *taken, *_OF_MODEL}, why)
    check_flags()


def _model(own: Collection[str] = ()) -> tuple[Any, str, Any]:
    """What the flags ask for, the checkpoint, and what is noted in it.

    Flags that are `own` are not taken from the training.
    """
    from pipemesh.checkpoint import Manifest
    from pipemesh.training.command.evaluate import checkpoint_of

    from . import about, command_line

    command_line.take_up(command_line.FLAGS.checkpoint, own, tells=False)
    request = command_line.request()
    path = checkpoint_of(request.logdir)
    there = about.About.from_note(Manifest.read(path).note)
    there.check_model(request.model, request.settings, request.logdir)
    return request, path, there


def _subject(request: Any, path: str, there: Any) -> tuple[Any, Any]:
    """The model, and how it spells text."""
    from pipemesh.training.command.decode import Tokens

    from .train import Text, make_subject
    from .vocabulary import Vocabulary

    words = Vocabulary(there.vocabulary)
    # Experts have room for all tokens, so that no text depends on what comes with it.
    request.settings.CAPACITY_FACTOR = None
    subject, _ = make_subject(request, Text(None, there.data, words, path, there))
    tokens = Tokens(
        lambda text: [words.bos_id, *words.encode(text)],
        lambda ids: words.decode([each for each in ids if each != words.bos_id]),
        frozenset([words.eos_id]),
        request.settings.SEQUENCE_LENGTH,
        words.size,
    )
    return subject, tokens


if __name__ == "__main__":
    program.run(main)
