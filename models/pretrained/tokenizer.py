"""The tokenizer that lies beside weights: `tokenizer.json`, or a model of SentencePiece."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from models.pretrained.config import Config, WeightsError
from pipemesh.errors import install

JSON, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """How a model spells text.

    Attributes:
        path: of the file that says it.
        encode: the ids of a text, with what begins one.
        decode: the text of ids, without what begins or ends one.
    """

    path: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load(folder: str, config: Config) -> Tokenizer | None:
    """The tokenizer of a folder; None if there is none.

    Args:
        folder: of weights, or of a training.
        config: of the model.

    Raises:
        WeightsError: it is none that can be read, or the package that reads it is missing.
    """
    for name, of in ((JSON, _of_json), (SENTENCEPIECE, _of_sentencepiece)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return of(path, config)
    return None


def _of_json(path: str, config: Config) -> Tokenizer:
    del config
    tokenizers = _package("tokenizers", path)
    try:
        found = tokenizers.Tokenizer.from_file(path)
    # It raises no kind of its own.
    except Exception as error:
        raise WeightsError(
            f"{path!r} is no tokenizer of the package tokenizers ({error})"
        ) from error
    return Tokenizer(
        path,
        lambda text: found.encode(text).ids,
        lambda ids: found.decode(list(ids), skip_special_tokens=True),
    )


def _of_sentencepiece(path: str, config: Config) -> Tokenizer:
    sentencepiece = _package("sentencepiece", path)
    try:
        with open(path, "rb") as file:
            found = sentencepiece.SentencePieceProcessor(model_proto=file.read())
    except OSError as error:
        raise WeightsError(f"{path!r} cannot be read ({error.strerror})") from error
    except RuntimeError as error:
        raise WeightsError(
            f"{path!r} is no SentencePiece model ({error}); if a {JSON} came with it, put that "
            "beside the weights"
        ) from error
    begin = [] if config.bos is None else [config.bos]
    size = found.get_piece_size()
    # A table may have more rows than there are pieces.
    return Tokenizer(
        path,
        lambda text: [*begin, *found.encode(text)],
        lambda ids: found.decode([int(each) for each in ids if each < size]),
    )


def _package(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WeightsError(
            f"{path!r} needs the package {name}, which is not installed; {install('examples')}"
        ) from error
