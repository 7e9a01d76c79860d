"""The vocabulary of a model: pieces that both languages share, learned from the training text."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import types
from collections.abc import Callable
from typing import Any

from pipemesh.checkpoint import newest_whole
from pipemesh.checkpoint.files import write_whole
from pipemesh.data import parse_sources
from pipemesh.data.sources import rows_of
from pipemesh.errors import DataError

from ..one_billion_word.corpus import Sentences
from ..one_billion_word.vocabulary import Vocabulary, train_vocabulary
from ..pretrained import tokenizer
from ..pretrained.tokenizer import SENTENCEPIECE, Tokenizer

# The ids of pieces that `train_vocabulary` adds.
BOS, EOS = 1, 2


@dataclasses.dataclass(frozen=True)
class LearnedSpelling:
    """A function that returns the tokenizer in a folder, and the number of tokens.

    At first it learns the pieces and writes them.

    Attributes:
        folder: the log directory.
        size: the number of tokens.
        sources: the training data, as `pipemesh.data.DocumentBatches` has it; "" to learn nothing.
    """

    folder: str
    size: int
    sources: str | Callable[[], str]

    def __reduce__(self) -> Any:
        # For another process, which has another working folder, and reads the pieces only.
        return type(self), (os.path.abspath(self.folder), self.size, "")

    def __call__(self) -> tuple[Tokenizer, int]:
        """Reads or learns the pieces.

        Raises:
            DataError: the folder has checkpoints, but no pieces; or both sides are not texts.
            VocabularyError: the text supports no vocabulary of this size.
        """
        path = os.path.join(self.folder, SENTENCEPIECE)
        if self.sources and not os.path.exists(path):
            if newest_whole(self.folder):
                raise DataError(
                    f"{self.folder!r} has checkpoints, but no {SENTENCEPIECE}, which says what "
                    "their tokens mean; put the file back"
                )
            os.makedirs(self.folder, exist_ok=True)
            write_whole(path, train_vocabulary(Sentences(self._texts()), self.size).model)
        return read(self.folder, self.size), self.size

    def _texts(self) -> tuple[str, ...]:
        listed = self.sources if isinstance(self.sources, str) else self.sources()
        texts = list[str]()
        for source in parse_sources(listed):
            for place, row in rows_of(source):
                sides = [row.get(name) for name in ("prompt", "completion")]
                if not all(isinstance(side, str) for side in sides):
                    raise DataError(f"{place} has no prompt and completion that are texts")
                texts += map(str, sides)
        return tuple(texts)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of the pieces, which are learned now if they were not before."""
        self()
        with open(os.path.join(self.folder, SENTENCEPIECE), "rb") as file:
            return {SENTENCEPIECE: hashlib.sha256(file.read()).hexdigest()[:16]}


def read(folder: str, size: int) -> Tokenizer:
    """Returns the tokenizer in a folder; raises DataError if there is none of so many tokens."""
    config: Any = types.SimpleNamespace(bos=BOS, eos=(EOS,), vocab_size=size)
    found = tokenizer.load(folder, config)
    if found is None:
        raise DataError(f"{folder!r} has no {SENTENCEPIECE}, which training writes there")
    with open(os.path.join(folder, SENTENCEPIECE), "rb") as file:
        number = Vocabulary(file.read()).size
    if number != size:
        raise DataError(
            f"{SENTENCEPIECE} in {folder!r} has {number} pieces, but the model has {size} tokens; "
            f"set --vocab_size={number}, or remove the file before a new run"
        )
    return found
