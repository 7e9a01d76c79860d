"""Translators as `pipemesh decode` sees them: a prompt is a source, its continuation the target.

pipemesh decode --logdir=runs/TranslationTiny --prompt="Ajouter un dossier" --beams=4
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.checkpoint import Manifest
from pipemesh.commands import model_kind
from pipemesh.commands.flags import FLAGS
from pipemesh.commands.model_kind import RegisteredKind, Texts, Tokens
from pipemesh.decoding_limits import SourcePrompt
from pipemesh.errors import CheckpointError


class TranslationKind(RegisteredKind):
    """Registered models whose log directory has the pieces of the vocabulary."""

    def texts(self, command: str, texts: Sequence[str]) -> Texts:
        """Returns the model for `decode`."""
        if command != "decode":
            raise CheckpointError(
                f"pipemesh {command} is for models that continue texts, and the checkpoint is of a "
                "translator; use pipemesh decode or evaluate"
            )
        from pipemesh.training import find_model

        from . import spelling

        folder = self.logdir()
        path = model_kind.checkpoint_of(folder)
        model_kind.check_note(Manifest.read(path).note, folder)
        config = find_model(FLAGS.model)()
        model_kind.take_flags(config, FLAGS, folder)
        words, length = spelling.read(folder, config.VOCAB_SIZE), config.SEQUENCE_LENGTH

        def encode(text: str) -> SourcePrompt:
            return SourcePrompt([*words.spans(text, False)[0], spelling.EOS], [spelling.BOS])

        longest = max((len(encode(text).source) for text in texts), default=length)
        tokens = Tokens(
            encode,
            words.decode,
            frozenset([spelling.EOS]),
            length,
            config.VOCAB_SIZE,
            source_length=min(length, longest),
        )
        return Texts(model_kind.subject(), path, tokens, config.BATCH_SIZE)


KIND = TranslationKind()
