"""Models whose weights were imported, as `decode`, `score` and `export` see them.

pipemesh decode --logdir=runs/gpt2 --prompt="The module" --max_tokens=24
pipemesh decode --logdir=runs/gpt2 --prompt="464 8265" --ids
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from pipemesh.checkpoint import Manifest
from pipemesh.commands import model_kind
from pipemesh.commands.flags import FLAGS, TEXTS, Flag, FlagError
from pipemesh.commands.model_kind import RegisteredKind, Texts, Tokens
from pipemesh.decoding_limits import SourcePrompt
from pipemesh.errors import CheckpointError

from . import config as configs
from . import tokenizer


class PretrainedKind(RegisteredKind):
    """Registered models whose log directory has the tokenizer and config.json."""

    text_flags = (
        Flag(
            "ids",
            bool,
            False,
            help="Texts are token ids, such as 12 7 30, on input and output.",
            group=TEXTS,
        ),
    )

    def texts(self, command: str, texts: Sequence[str]) -> Texts:
        """Returns the model for a command on texts."""
        from pipemesh.training import find_model

        folder = self.logdir()
        path = model_kind.checkpoint_of(folder)
        model_kind.check_note(Manifest.read(path).note, folder)
        config = configs.of_folder(folder)
        # An export has only ids.
        encode, decode = _spelling(FLAGS.value("ids", True), folder, config)
        # Each text once.
        encode = functools.cache(encode)
        subject_class = find_model(FLAGS.model)
        length, source_length = config.max_length, None
        if config.kind == "encoder_decoder":
            if command != "decode":
                raise CheckpointError(
                    f"pipemesh {command} is for models that continue texts, but the checkpoint is "
                    "of an encoder-decoder; use pipemesh decode"
                )
            most = subject_class.SEQUENCE_LENGTH
            source_length = max((len(encode(text)) for text in texts), default=most)
            length = 1 + FLAGS.value("max_tokens", most)
            spelled, start = encode, config.start
            encode = functools.cache(lambda text: SourcePrompt(spelled(text), [start]))
        elif texts:
            # There is a row for each position, and some models have many.
            longest = max(len(encode(text)) for text in texts)
            length = min(length, longest + FLAGS.value("max_tokens", 0))
        ends = configs.ends_of(folder, config)[0]
        tokens = Tokens(encode, decode, ends, length, config.vocab_size, source_length)
        subject = model_kind.subject()
        rows = FLAGS.value("batch_size") or subject_class.BATCH_SIZE
        return Texts(subject, path, tokens, rows)


KIND = PretrainedKind()


def _spelling(ids: bool, folder: str, config: Any) -> tuple[Callable[[str], Any], Any]:
    """Returns functions from texts to tokens, and from tokens to texts."""
    if ids:
        return _ids_of, lambda tokens: " ".join(map(str, tokens))
    words = tokenizer.load(folder, config)
    if words is None:
        raise FlagError(
            f"--logdir={folder!r} has neither {tokenizer.JSON} nor {tokenizer.SENTENCEPIECE}; put "
            "that of the model there, or give --ids, and token ids as --prompt"
        )
    return words.encode, words.decode


def _ids_of(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise FlagError(
            f"with --ids a text is token ids, such as 12 7 30, but it is {text!r}"
        ) from error
