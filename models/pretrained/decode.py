"""Continues texts with a model whose weights were imported, scores them, and exports the model.

    pipemesh decode --logdir=runs/gpt2 --prompt="The module" --max_tokens=24
    pipemesh decode --logdir=runs/gpt2 --prompt="464 8265" --ids

Standard output has the texts and nothing else. The plan may be another than that of the training.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pipemesh.training.command import program


class _Model(NamedTuple):
    """What is asked for.

    Attributes:
        folder: of the checkpoint, which has config.json and the tokenizer.
        path: of the checkpoint.
        config: what the model is made of.
        encode: ids of a text.
        decode: text of ids.
    """

    folder: str
    path: str
    config: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[Any], str]

    def tokens(self, length: int) -> Any:
        """How texts are spelled that have so many tokens, or fewer if the model has no more."""
        from pipemesh.training.command.decode import Tokens

        from . import config as configs

        return Tokens(
            self.encode,
            self.decode,
            configs.ends_of(self.folder, self.config)[0],
            min(self.config.max_length, length),
            self.config.vocab_size,
        )

    def longest(self, texts: Collection[str]) -> int:
        """Tokens of the longest text: there is a place for each, and some models can have many."""
        return max(len(self.encode(text)) for text in texts)


def main(argv: list[str]) -> int:
    """Decodes as the flags say; returns the exit code."""
    from absl import flags

    from pipemesh.training.command import decode, given_texts, model_flags

    _parse(argv, __doc__, given_texts.TAKEN, {}, decode.define, _define_ids)
    texts = decode.asked()
    model = _model(decode.OWN)
    tokens = model.tokens(model.longest(texts) + flags.FLAGS.max_tokens)
    decode.decode(model_flags.subject(), model.path, tokens, texts)
    return 0


def score(argv: list[str]) -> int:
    """Scores as the flags say; returns the exit code."""
    from pipemesh.training.command import given_texts, model_flags, score

    _parse(argv, score.__doc__, score.TAKEN, {}, score.define, _define_ids)
    texts = given_texts.read("scored")
    model = _model()
    subject = model_flags.subject()
    tokens = model.tokens(model.longest(texts))
    score.score(subject, model.path, tokens, _params().BATCH_SIZE, texts)
    return 0


def export(argv: list[str]) -> int:
    """Exports as the flags say; returns the exit code."""
    from pipemesh.training.command import export, model_flags

    _parse(argv, export.__doc__, export.TAKEN, export.WHY, export.define)
    export.asked()
    model = _model()
    export.export(model_flags.subject(), model.path, model.tokens(model.config.max_length))
    return 0


def _define_ids() -> None:
    from absl import flags

    from pipemesh.training.command.flags import TEXTS, group

    with group(TEXTS):
        flags.DEFINE_bool("ids", False, "Texts are ids of tokens, 12 7 30, and so is what is said.")


def _parse(
    argv: list[str],
    about: str | None,
    taken: Collection[str],
    why: Mapping[str, str],
    *defines: Callable[[], None],
) -> None:
    from pipemesh.training.command import model_flags, training_flags
    from pipemesh.training.command.evaluate import check_flags, define_checkpoint
    from pipemesh.training.command.flags import define_for, parse

    program = sys.modules[__name__]
    define_for(program, model_flags.define, training_flags.define)
    own = define_for(program, *defines, define_checkpoint)
    parse(argv, program, about, {*own, *taken}, why)
    check_flags()


def _model(own: Collection[str] = ()) -> _Model:
    """The model that flags name; those that are `own` are not taken from the training."""
    from absl import flags

    from pipemesh.checkpoint import Manifest
    from pipemesh.training.command import model_flags, training_flags
    from pipemesh.training.command.evaluate import checkpoint_of

    from . import config as configs

    values = flags.FLAGS
    folder = model_flags.logdir()
    training_flags.take_up(folder, sys.modules[__name__], values.checkpoint, own, tells=False)
    path = checkpoint_of(folder)
    model_flags.check_note(Manifest.read(path).note, folder)
    config = configs.of_folder(folder)
    # An export has ids alone.
    encode, told = _spelling("ids" not in values or values.ids, folder, config)
    # Each text once.
    return _Model(folder, path, config, functools.cache(encode), told)


def _params() -> Any:
    """The class of the model."""
    from absl import flags

    from pipemesh.training import find_model

    return find_model(flags.FLAGS.model)


def _spelling(ids: bool, folder: str, config: Any) -> tuple[Callable[[str], Any], Any]:
    """How texts become tokens, and how tokens become texts."""
    from pipemesh.training.command.flags import FlagError

    from . import tokenizer

    if ids:
        return _ids_of, lambda found: " ".join(map(str, found))
    words = tokenizer.load(folder, config)
    if words is None:
        raise FlagError(
            f"--logdir={folder!r} has neither {tokenizer.JSON} nor {tokenizer.SENTENCEPIECE}; put "
            "that of the model there, or give --ids, and numbers of tokens as --prompt"
        )
    return words.encode, words.decode


def _ids_of(text: str) -> list[int]:
    from pipemesh.training.command.flags import FlagError

    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise FlagError(
            f"with --ids a prompt is numbers of tokens, such as 12 7 30, but there is {text!r}"
        ) from error


if __name__ == "__main__":
    program.run(main)
