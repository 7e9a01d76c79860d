"""Continues texts with a model whose weights were imported.

    pipemesh decode --logdir=runs/gpt2 --prompt="The module" --max_tokens=24
    pipemesh decode --logdir=runs/gpt2 --prompt="464 8265" --ids

Standard output has the texts and nothing else. The plan may be another than that of the training.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from pipemesh.training.command import program


def main(argv: list[str]) -> int:
    """Decodes as the flags say; returns the exit code."""
    from absl import flags

    from models.pretrained import config as configs
    from pipemesh.checkpoint import Manifest
    from pipemesh.training.command import decode, model_flags, training_flags
    from pipemesh.training.command.evaluate import check_flags, checkpoint_of, define_checkpoint
    from pipemesh.training.command.flags import parse

    this = sys.modules[__name__]
    values = flags.FLAGS
    model_flags.define()
    training_flags.define()
    define_checkpoint()
    decode.define()
    flags.DEFINE_bool("ids", False, "Prompts are ids of tokens, 12 7 30, and so is what is said.")
    parse(argv, this, __doc__)
    check_flags()
    texts = decode.prompts()
    given = [name for name in decode.OF_TRAINING if values[name].present]
    if given:
        raise decode.FlagError(f"--{given[0]} is for training; leave it out")
    folder = model_flags.logdir()
    # Other stages than those of the training are cut elsewhere.
    training_flags.take_up(folder, this, values.checkpoint, (*decode.OF_TRAINING, "boundaries"))
    path = checkpoint_of(folder)
    model_flags.check_note(Manifest.read(path).note, folder)
    config = configs.read(os.path.join(folder, configs.FILE))
    encode, told = _spelling(values.ids, folder, config)
    # Each text once.
    encode = functools.cache(encode)
    longest = max(len(encode(text)) for text in texts)
    tokens = decode.Tokens(
        encode,
        told,
        configs.ends_of(folder, config),
        # There is a place for each key and value, and some models can have very many.
        min(config.max_length, longest + values.max_tokens),
        config.vocab_size,
    )
    decode.decode(model_flags.subject(), path, tokens, texts)
    return 0


def _spelling(ids: bool, folder: str, config: Any) -> tuple[Callable[[str], Any], Any]:
    """How texts become tokens, and how tokens become texts."""
    from models.pretrained import tokenizer
    from pipemesh.training.command.flags import FlagError

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
