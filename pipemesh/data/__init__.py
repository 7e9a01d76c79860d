"""Documents for training: sources, tokens with weights, packed rows, and mixtures.

Only `DocumentBatches` needs TensorFlow, as do files of records.

Example:
    >>> import os, tempfile
    >>> from pipemesh.data import documents_of, parse_sources
    >>> path = os.path.join(tempfile.mkdtemp(), "a.jsonl")
    >>> with open(path, "w") as file:
    ...     _ = file.write('{"ids": [5, 6, 7], "weights": [0, 0, 1]}')
    >>> (source,) = parse_sources(path)
    >>> [document.ids.tolist() for document in documents_of(source, None, vocab_size=8)]
    [[5, 6, 7]]
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipemesh.data.corruption import MaskedTokens, SpanCorruption
from pipemesh.data.documents import Document, Spelling, documents_of
from pipemesh.data.rows import Counts
from pipemesh.data.sources import Source, parse_sources
from pipemesh.data.token_files import write_tokens

if TYPE_CHECKING:
    from pipemesh.data.mixture import DocumentBatches

__all__ = [
    "Counts",
    "Document",
    "DocumentBatches",
    "MaskedTokens",
    "Source",
    "SpanCorruption",
    "Spelling",
    "documents_of",
    "parse_sources",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name != "DocumentBatches":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # First: it says what is missing.
    importlib.import_module("pipemesh.needs_tensorflow")
    return importlib.import_module("pipemesh.data.mixture").DocumentBatches


def __dir__() -> list[str]:
    return __all__
