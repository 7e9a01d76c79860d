"""The tokenizer beside weights: `tokenizer.json`, or a SentencePiece model."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipemesh.errors import install

from .families import Config
from .values import WeightsError, json_object

JSON, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
# The options file, and older files for two of its options: added tokens, and special tokens by
# name.
OPTIONS, ADDED = "tokenizer_config.json", "added_tokens.json"
SPECIAL = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
FILES = (JSON, SENTENCEPIECE, OPTIONS, ADDED, SPECIAL, TEMPLATE)
# Special tokens in the options, in the order in which tokens without an id get one; then lists.
_NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Advice for getting a supported file.
SAVE = "save it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
_OF_TOKENS = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
# `normalizer_spec { add_dummy_prefix: false }` of a SentencePiece model. It overrides that of the
# model before it.
_NO_PREFIX = b"\x1a\x02\x18\x00"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model.

    Attributes:
        path: the file that defines it.
        encode: returns the ids of a text, including tokens that start one.
        decode: returns the text of ids, without tokens that start or end one.
        spans: returns the ids of a text, and the begin and end of each in it; the second argument
            says whether tokens that start or end a text are included.
        special: texts of special tokens by name, such as `bos_token`.
        end: the token that ends a document for training; None if there is none.
        template: the chat template; None if there is none.
        notes: lines about tokens that the model lacks.
    """

    path: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    spans: Callable[[str, bool], tuple[list[int], list[tuple[int, int]]]]
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    end: int | None = None
    template: str | None = None
    notes: tuple[str, ...] = ()


def load(folder: str, config: Config) -> Tokenizer | None:
    """Returns the tokenizer in a folder, or None; raises WeightsError if it cannot be read."""
    for name, of in ((JSON, _of_json), (SENTENCEPIECE, _of_sentencepiece)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            options = _Options(folder)
            found, size = of(path, options, config)
            found = _with_options(found, options, folder, config)
            return _within(found, size, config.vocab_size)
    return None


def _with_options(found: Tokenizer, options: _Options, folder: str, config: Config) -> Tokenizer:
    """Adds special tokens by name, the token that ends a document, and the chat template."""
    special, end = options.special(), config.eos[0] if config.eos else None
    if "eos_token" in special:
        ids, _ = found.spans(special["eos_token"], False)
        # Otherwise it is none of the tokenizer's.
        end = ids[0] if len(ids) == 1 else end
    template = options.template()
    path = os.path.join(folder, TEMPLATE)
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                template = file.read()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise WeightsError(f"{path!r} cannot be read ({why})") from error
    return dataclasses.replace(found, special=special, end=end, template=template)


def _within(found: Tokenizer, size: int, vocab_size: int) -> Tokenizer:
    """Returns a tokenizer that refuses ids that the model lacks; its ids are below `size`."""

    def encode(text: str) -> list[int]:
        ids = found.encode(text)
        most = max(ids, default=0)
        if most >= vocab_size:
            raise WeightsError(
                f"a text has the token {most} ({found.decode([most])!r}), but the model has the "
                f"ids 0 to {vocab_size - 1}; leave it out, or give the tokenizer that belongs to "
                f"the model in place of {found.path!r}"
            )
        return ids

    if size <= vocab_size:
        return found
    note = (
        f"{found.path} has {size:,} tokens, but the model has {vocab_size:,}: texts that have one "
        "of the others are refused"
    )
    return dataclasses.replace(found, encode=encode, notes=(note,))


class _Options:
    """The files beside a tokenizer that change the ids of texts."""

    def __init__(self, folder: str) -> None:
        paths = [os.path.join(folder, name) for name in (OPTIONS, ADDED, SPECIAL)]
        self.path = paths[0]
        self._values, self._added, special = (
            json_object(path) if os.path.exists(path) else {} for path in paths
        )
        if "added_tokens_decoder" not in self._values:
            self._values |= special

    def flag(self, name: str, default: bool) -> bool:
        """Returns a flag; null means the default."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise WeightsError(f"{self.path}: {name} is {value!r}; it is true or false")
        return value

    def special(self) -> dict[str, str]:
        """Returns the texts of special tokens by name."""
        values = {name: self._values.get(name) for name in _NAMED}
        texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in values.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def template(self) -> str | None:
        """Returns the chat template, of several the one that is called default."""
        value = self._values.get("chat_template")
        if isinstance(value, list) and all(isinstance(each, dict) for each in value):
            value = {each.get("name"): each.get("template") for each in value}.get("default")
        if value is not None and not isinstance(value, str):
            raise WeightsError(
                f"{self.path}: chat_template must be a text, or a list of objects with name and "
                "template, one of them with the name default"
            )
        return value

    def tokens(self) -> Iterator[tuple[Mapping[str, Any], int | None]]:
        """Yields arguments of an `AddedToken` and its id, or None for the next free id."""
        values = [self._values.get(name) for name in _NAMED]
        try:
            for name in _LISTS:
                more = self._values.get(name) or ()
                values += more.values() if isinstance(more, dict) else more
            special = [
                _arguments(each if isinstance(each, dict) else {"content": each})
                for each in values
                if each is not None
            ]
            texts = [each["content"] for each in special]
            added = self._values.get("added_tokens_decoder")
            if added is None:
                added = {
                    number: {
                        "content": text,
                        "special": text in texts,
                        "normalized": text not in texts,
                    }
                    for text, number in self._added.items()
                }
            for number, token in sorted((int(number), token) for number, token in added.items()):
                yield _arguments(token), number
        except (AttributeError, TypeError, ValueError) as error:
            raise WeightsError(f"{self.path}: a token is malformed ({error})") from error
        yield from (({**each, "special": True}, None) for each in special)

    def wrong(self, text: str, number: int | None, why: str) -> WeightsError:
        """Returns the error for a token that cannot have its given id."""
        return WeightsError(f"{self.path}: the token {text!r}, id {number}, {why}; {SAVE}")


def _arguments(token: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an `AddedToken`."""
    if not isinstance(token.get("content"), str):
        raise ValueError(f"{token!r} has no content")
    return {name: token[name] for name in _OF_TOKENS if name in token}


def _of_json(path: str, options: _Options, config: Config) -> tuple[Tokenizer, int]:
    del config
    tokenizers = _package("tokenizers", path)
    try:
        found = tokenizers.Tokenizer.from_file(path)
    # The package has no specific exception class.
    except Exception as error:
        raise WeightsError(
            f"{path!r} is no tokenizer of the package tokenizers ({error})"
        ) from error
    # The file keeps these settings of the last run; `transformers` disables them, too.
    found.no_truncation()
    found.no_padding()
    if (processor := found.post_processor) is not None:
        # Where a token begins says whether it counts; without the spaces that belong to it, it
        # would begin later.
        state = json.loads(processor.__getstate__(), object_hook=_untrimmed)
        processor.__setstate__(json.dumps(state).encode())
        found.post_processor = processor
    known = {token.content for token in found.get_added_tokens_decoder().values()}
    for token, number in options.tokens():
        text = token["content"]
        if text not in known:
            found.add_tokens([tokenizers.AddedToken(**token)])
            known.add(text)
        if number is not None and found.token_to_id(text) != number:
            raise options.wrong(text, number, f"has the id {found.token_to_id(text)} in {path}")

    def spans(text: str, begins: bool) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = found.encode(text, add_special_tokens=begins)
        return encoded.ids, encoded.offsets

    spelling = Tokenizer(
        path,
        lambda text: found.encode(text).ids,
        lambda ids: found.decode(list(ids), skip_special_tokens=True),
        spans,
    )
    return spelling, max(found.get_vocab().values(), default=-1) + 1


def _untrimmed(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"trim_offsets": False} if "trim_offsets" in values else values


def _of_sentencepiece(path: str, options: _Options, config: Config) -> tuple[Tokenizer, int]:
    """Returns a tokenizer that first finds control tokens, then cuts each part between them into
    pieces.
    """
    sentencepiece = _package("sentencepiece", path)
    try:
        with open(path, "rb") as file:
            proto = file.read()
        found, bare = (
            sentencepiece.SentencePieceProcessor(model_proto=each)
            for each in (proto, proto + _NO_PREFIX)
        )
    except OSError as error:
        raise WeightsError(f"{path!r} cannot be read ({error.strerror})") from error
    except RuntimeError as error:
        raise WeightsError(
            f"{path!r} is no SentencePiece model ({error}); if a {JSON} came with it, put that "
            "beside the weights"
        ) from error
    size = found.get_piece_size()
    numbers, shown = _special(found, options, path)
    pattern = re.compile(f"({'|'.join(map(re.escape, sorted(numbers, key=len, reverse=True)))})")
    has_bos = options.flag("add_bos_token", True)
    begin_ids = [] if config.bos is None or not has_bos else [config.bos]
    end = [found.eos_id()] if options.flag("add_eos_token", False) else []
    first = found if options.flag("add_prefix_space", True) else bare
    # Early `transformers` put a space before each part; later models put it only before the whole
    # text.
    later = first if options.flag("legacy", True) else bare

    def spans(text: str, begins: bool) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for index, part in enumerate(pattern.split(text)):
            if index % 2:
                ids.append(numbers[part])
                places.append((at, at + len(part)))
            elif part:
                begin = at
                for piece in (later if index else first).encode_as_proto(part).pieces:
                    ids.append(piece.id)
                    # Its own offsets count bytes.
                    places.append((begin, begin + len(piece.surface)))
                    begin += len(piece.surface)
            at += len(part)
        if begins:
            ids = [*begin_ids, *ids, *end]
            places = [*[(0, 0)] * len(begin_ids), *places, *[(at, at)] * len(end)]
        return ids, places

    def encode(text: str) -> list[int]:
        return spans(text, True)[0]

    def decode(ids: Sequence[int]) -> str:
        parts: list[list[int]] = [[]]
        texts: list[str] = [""]
        for each in map(int, ids):
            if each in shown:
                texts.append(shown[each])
                parts.append([])
            elif each < size:
                # The embedding may have more rows than there are pieces.
                parts[-1].append(each)
        spelled = ((later if index else first).decode(part) for index, part in enumerate(parts))
        return "".join(text + part for text, part in zip(texts, spelled, strict=True))

    return Tokenizer(path, encode, decode, spans), max(
        size, *(number + 1 for number in numbers.values())
    )


def _special(found: Any, options: _Options, path: str) -> tuple[dict[str, int], dict[int, str]]:
    """Returns ids by the text of control and added tokens, and the texts of added ordinary ones."""
    size: int = found.get_piece_size()
    is_special = (found.is_control, found.is_unknown)
    numbers: dict[str, int] = {
        found.id_to_piece(i): i for i in range(size) if any(check(i) for check in is_special)
    }
    shown: dict[int, str] = {}
    for token, number in options.tokens():
        text = str(token["content"])
        at: int = found.piece_to_id(text)
        if found.id_to_piece(at) != text:
            free = max(size, *(each + 1 for each in numbers.values()))
            at = numbers.get(text, free) if number is None else number
            if at < size:
                raise options.wrong(text, number, f"is {found.id_to_piece(at)!r} in {path}")
        elif number is not None and number != at:
            raise options.wrong(text, number, f"has the id {at} in {path}")
        if any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            raise options.wrong(text, number, f"takes spaces beside it, which {path} does not do")
        numbers[text] = at
        if at >= size and not token.get("special"):
            shown[at] = text
    return numbers, shown


def _package(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WeightsError(
            f"{path!r} needs the package {name}, which is not installed; {install('examples')}"
        ) from error
