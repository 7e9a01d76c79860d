"""Documents as rows of tokens of a model."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

from pipemesh.data import DocumentBatches, text_file

from . import config as configs
from . import tokenizer
from .tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class FolderSpelling:
    """A function that returns the tokenizer in a folder, or None, and the model's number of tokens.

    Attributes:
        folder: a folder with config.json, such as a log directory.
        starts: whether texts that begin get the token that starts a target.
    """

    folder: str
    starts: bool = False

    def __reduce__(self) -> Any:
        # For another process, with another working folder.
        return type(self), (os.path.abspath(self.folder), self.starts)

    def __call__(self) -> tuple[Tokenizer | None, int]:
        """Reads the files; raises WeightsError if they are unusable."""
        config = configs.read(os.path.join(self.folder, configs.FILE))
        found = tokenizer.load(self.folder, config)
        if found is None or not self.starts:
            return found, config.vocab_size
        spans = found.spans

        def started(text: str, begins: bool) -> tuple[list[int], list[tuple[int, int]]]:
            ids, places = spans(text, begins)
            return ([config.start, *ids], [(0, 0), *places]) if begins else (ids, places)

        return dataclasses.replace(found, spans=started), config.vocab_size

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the tokenizer's files, by name, and what it takes from config.json."""
        config = configs.read(os.path.join(self.folder, configs.FILE))
        taken = {configs.FILE: f"{config.vocab_size} tokens, bos {config.bos}, eos {config.eos}"}
        paths = {name: os.path.join(self.folder, name) for name in tokenizer.FILES}
        return taken | {
            name: hashlib.sha256(b"".join(text_file.blocks(path))).hexdigest()[:16]
            for name, path in paths.items()
            if os.path.exists(path)
        }


def batches_of(
    sources: str,
    folder: str,
    length: int,
    batch_size: int,
    packing: str = "auto",
    seed: int | None = None,
    **others: Any,
) -> DocumentBatches:
    """Returns the batches of a list of sources, spelled as in `parse_sources`, with the tokenizer
    of a folder; `others` are further attributes.
    """
    of_folder = FolderSpelling(folder, others.get("source_length") is not None)
    return DocumentBatches(sources, of_folder, length, batch_size, packing, seed, **others)
