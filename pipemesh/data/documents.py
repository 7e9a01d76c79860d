"""Documents: tokens with the weight of each, made from the fields of a row."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipemesh.data.chat import ChatTemplate
from pipemesh.data.sources import FIELDS, Source, rows_of
from pipemesh.errors import DataError, PipemeshError

# Kinds of documents, by the field that each must have, with the others that it may have.
_KINDS = {
    "text": (),
    "completion": ("prompt",),
    "messages": ("tools",),
    "ids": ("weights",),
}


class Spelling(Protocol):
    """A tokenizer, as documents need it."""

    @property
    def template(self) -> str | None:
        """Returns the chat template; None if there is none."""
        ...

    @property
    def special(self) -> Mapping[str, str]:
        """Returns the texts of special tokens by name, such as `bos_token`."""
        ...

    @property
    def end(self) -> int | None:
        """Returns the token that ends a document; None if there is none."""
        ...

    def spans(self, text: str, begins: bool, /) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a text, and begin and end of each in the text.

        `begins` says whether to add tokens that begin or end a text.
        """
        ...


class Document(NamedTuple):
    """The tokens of a document.

    Attributes:
        ids: int32 [tokens].
        weights: float32 [tokens]: how much it counts that a token is predicted; None if all count
            alike.
        source: the number of tokens at the start that an encoder reads, before those of the target.
    """

    ids: np.ndarray
    weights: np.ndarray | None
    source: int = 0


def documents_of(
    source: Source, spelling: Spelling | None, vocab_size: int, pairs: bool = False
) -> Iterator[Document]:
    """Yields the documents of a source as tokens with weights.

    A text counts whole, of a prompt and its completion only the completion, and of a chat only what
    the assistant wrote. The token that ends a document is added to texts and completions.

    Args:
        source: the source.
        spelling: the tokenizer; None for sources of ready tokens.
        vocab_size: number of tokens of the model.
        pairs: whether prompts are sources, which an encoder reads, and completions their targets.
            The token that ends a document is added to both; a target has the token that begins one.

    Returns:
        An iterator over the documents, in the order of the files.

    Raises:
        DataError: a document has missing, ambiguous or malformed fields, or a token that the model
            lacks. The error names its place.
        MissingPackageError: a package that reads the files is not installed.

    Example:
        >>> import os, tempfile
        >>> from pipemesh.data import parse_sources
        >>> path = os.path.join(tempfile.mkdtemp(), "a.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"ids": [5, 6], "weights": [0, 0.5]}')
        >>> (source,) = parse_sources(path)
        >>> [each.weights.tolist() for each in documents_of(source, None, vocab_size=8)]
        [[0.0, 0.5]]
    """
    for place, row in rows_of(source):
        try:
            document = _pair(row, spelling) if pairs else _document(row, spelling, source)
        except PipemeshError as error:
            if isinstance(error, ImportError):
                raise
            raise DataError(f"{place}: {error}") from error
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: a text is no Unicode ({error})") from error
        ids = document.ids
        if len(ids) and not (0 <= ids.min() and ids.max() < vocab_size):
            wrong = next(int(each) for each in ids if not 0 <= each < vocab_size)
            raise DataError(
                f"{place} has the token {wrong}, but the model has the ids 0 to {vocab_size - 1}; "
                "take the tokenizer that belongs to the model"
            )
        yield document._replace(ids=ids.astype(np.int32))


def _document(row: Mapping[str, Any], spelling: Spelling | None, source: Source) -> Document:
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1:
        raise DataError(
            f"a document has either text, or prompt and completion, or messages, or ids, but this "
            f"one has {' and '.join(kinds) or ' and '.join(row)}"
        )
    (kind,) = kinds
    for name in FIELDS:
        if name in row and name != kind and name not in _KINDS[kind]:
            raise DataError(f"a document with {kind} has no field {name!r}; leave one of them out")
    if kind == "ids":
        return _ready(row)
    if spelling is None:
        raise DataError(
            "a text is no tokens, and there is no tokenizer; put tokenizer.json or tokenizer.model "
            "into the folder of the model"
        )
    if kind == "messages":
        return _chat(row, spelling, source)
    if kind == "completion" and "prompt" not in row:
        raise DataError("a document with a completion has no prompt; give both")
    prompt = _text(row, "prompt") if kind == "completion" else ""
    ids, spans = _spans(spelling, prompt + _text(row, kind), True)
    end = spelling.end
    if end is not None and ids[-1:] != [end]:
        ids, spans = [*ids, end], [*spans, (0, 0)]
    weights = None
    if kind == "completion":
        weights = _inside(spans, [(len(prompt), len(prompt) + len(row[kind]))])
        # It has no place in the text.
        if ids:
            weights[-1] = weights[-1] or ids[-1] == end
    return Document(np.array(ids, np.int64), weights)


def _pair(row: Mapping[str, Any], spelling: Spelling | None) -> Document:
    others = [name for name in row if name not in ("prompt", "completion")]
    if others or len(row) != 2:
        raise DataError(
            f"a pair has a prompt and a completion, but this row has {' and '.join(row)}"
        )
    if spelling is None or spelling.end is None:
        raise DataError("pairs need a tokenizer with a token that ends a text")
    sides = list[list[int]]()
    for name in ("prompt", "completion"):
        if not (text := _text(row, name)).strip():
            raise DataError(f"{name} is empty; give both sides of a pair, or leave it out")
        ids, _ = _spans(spelling, text, name == "completion")
        sides.append([*ids, *([spelling.end] if ids[-1:] != [spelling.end] else [])])
    source, target = sides
    return Document(np.array(source + target, np.int64), None, len(source))


def _spans(spelling: Spelling, text: str, begins: bool) -> tuple[list[int], list[tuple[int, int]]]:
    # Half of a pair of surrogates, which JSON allows, is refused.
    text.encode()
    return spelling.spans(text, begins)


def _ready(row: Mapping[str, Any]) -> Document:
    ids = _numbers(row, "ids", "iu")
    if "weights" not in row:
        return Document(ids, None)
    weights = _numbers(row, "weights", "iuf").astype(np.float32)
    if weights.shape != ids.shape:
        raise DataError(f"there are {len(ids)} ids, but {len(weights)} weights; give one for each")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise DataError("weights must be finite and not negative")
    return Document(ids, weights)


def _numbers(row: Mapping[str, Any], name: str, kinds: str) -> np.ndarray:
    try:
        found = np.array(row[name] if isinstance(row[name], list) else None)
    except (ValueError, OverflowError):
        found = np.array(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in kinds):
        what = "whole numbers" if name == "ids" else "numbers"
        raise DataError(f"{name} must be a list of {what}")
    return found if found.size else np.zeros([0], np.int64)


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise DataError(f"{name} is a {type(row[name]).__name__}; it must be a text")
    return row[name]


def _chat(row: Mapping[str, Any], spelling: Spelling, source: Source) -> Document:
    if spelling.template is None:
        raise DataError(
            "messages need a chat template, but the tokenizer has none; put chat_template.jinja "
            "into the folder of the model"
        )
    messages = row["messages"]
    is_list = isinstance(messages, list) and messages
    if not (is_list and all(isinstance(each, Mapping) for each in messages)):
        raise DataError("messages must be a list of objects with role and content")
    tools = row.get("tools")
    if not (tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools))):
        raise DataError("tools must be a list of objects, not a text of JSON")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {number} has no role; give it one, such as user")
    # Columns of a table are there for all messages; templates ask of calls whether content is none.
    messages = [
        ({"content": None} if each.get("tool_calls") else {})
        | {k: v for k, v in each.items() if v is not None}
        for each in messages
    ]
    template = _template(spelling.template, tuple(sorted(spelling.special.items())), source.date)
    text, parts = template.parts(messages, tools)
    ids, spans = _spans(spelling, text, False)
    return Document(np.array(ids, np.int64), _inside(spans, parts))


@functools.cache
def _template(text: str, special: tuple[tuple[str, str], ...], date: str) -> ChatTemplate:
    return ChatTemplate(text, dict(special), date)


def _inside(spans: Sequence[tuple[int, int]], parts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns 1 for each token that begins in one of the parts, and 0 for all others."""
    begins = np.array(spans, np.int64).reshape(-1, 2)[:, 0]
    found = np.zeros(len(begins), np.float32)
    for begin, end in parts:
        found[(begin <= begins) & (begins < end)] = 1
    return found
