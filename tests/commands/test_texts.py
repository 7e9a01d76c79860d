"""Texts on the command line: reading, streaming, scoring and the folder of an export."""

import contextlib
import dataclasses
import io
import json
import types

import pytest

from pipemesh.commands.flags import FLAGS, FlagError
from pipemesh.commands.model_kind import Tokens
from pipemesh.commands.texts import (
    DECODE_FLAGS,
    EXPORT_FLAGS,
    SCORE_FLAGS,
    Stream,
    _check_folder,
    ended,
    read_texts,
)

CONTENT = b"\xef\xbb\xbfhello\r\n\r\n \t\nwor\xe2\x80\xa8ld\r\nlast"


@pytest.fixture
def given(monkeypatch):
    """Sets the flags, and what standard input has."""

    def set_flags(file, content=b""):
        FLAGS.declare(DECODE_FLAGS)
        FLAGS.set("file", file)
        stream = types.SimpleNamespace(buffer=io.BytesIO(content))
        monkeypatch.setattr("sys.stdin", stream)

    return set_flags


def test_a_file_and_standard_input_are_read_alike(tmp_path, given):
    """Standard input kept the mark of UTF-8 and the ends of lines of Windows."""
    (tmp_path / "texts.txt").write_bytes(CONTENT)
    for file in (str(tmp_path / "texts.txt"), "-"):
        given(file, CONTENT)
        assert read_texts("scored") == ["hello", "wor\u2028ld", "last"]
    given("-", b"\n \r\n")
    with pytest.raises(FlagError, match="--file='-' is empty; give a text a line"):
        read_texts("scored")


def test_strings_of_json_are_read_exactly(tmp_path, given):
    path = tmp_path / "texts.jsonl"
    given(str(path))
    texts = ["\ufeffone\r", "two\nlines", "three "]
    path.write_text("\n\n".join(map(json.dumps, texts)))
    assert read_texts("scored") == texts
    for line, told in (
        ("no json", "line 2 is no JSON"),
        ('{"prompt": "a"}', 'line 2 is \'{"prompt": "a"}\'; give a string of JSON'),
        ('" "', "line 2 is empty; give some text"),
        ('"\\ud800"', "line 2 is not UTF-8; give text that is"),
    ):
        path.write_text(f'"a"\n{line}\n')
        with pytest.raises(FlagError, match=told):
            read_texts("scored")


@pytest.mark.parametrize("end_token", [True, False])
def test_a_text_has_one_end_token_or_none(end_token):
    """Where the tokenizer adds one, it counted twice."""
    FLAGS.declare(SCORE_FLAGS)
    FLAGS.set("end_token", end_token)
    end = [2] if end_token else []
    for ids in ([5, 6], [5, 6, 2]):
        assert ended(ids, frozenset([2, 9])) == [5, 6, *end]
    assert ended([5, 9], frozenset([2, 9])) == ([5, 9] if end_token else [5])
    assert ended([5], frozenset()) == [5]


STOP = 0
# Tokens are bytes: some characters have several.
TOKENS = Tokens(
    lambda text: list(text.encode()),
    lambda ids: bytes(ids).decode(errors="replace"),
    frozenset([STOP]),
    99,
    256,
)


def shown(texts, most, order):
    """Returns the text on the terminal after each token; `order` has the prompt of each token."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        stream = Stream(TOKENS, [b"<"] * len(texts), most)
    left, found = [list(text) for text in texts], []
    for number in order:
        stream.take(number, left[number].pop(0))
        found.append(out.getvalue())
    return found


def test_texts_come_token_by_token_in_their_order():
    assert shown([b"abc"], 3, [0] * 3) == ["<a", "<ab", "<abc\n"]
    # The token that ends a text is not shown.
    assert shown([b"a\0"], 9, [0, 0]) == ["<a", "<a\n"]
    # A character comes as a whole, unless the text ends in half of one.
    assert shown(["é!".encode()], 3, [0] * 3) == ["<", "<é", "<é!\n"]
    assert shown(["aé".encode()[:2]], 2, [0, 0])[-1] == "<a\ufffd\n"
    found = shown([b"ab", b"\0", b"xy"], 2, [2, 0, 1, 2, 0])
    assert found == ["", "<a", "<a", "<a", "<ab\n<\n<xy\n"]
    # With some tokenizers more tokens change earlier text, which is then printed again.
    spell = dataclasses.replace(
        TOKENS, decode=lambda ids: "".join(map(chr, ids)).replace("ab", "Z")
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        stream = Stream(spell, [[]], 2)
    stream.take(0, ord("a"))
    stream.take(0, ord("b"))
    assert out.getvalue() == "a\nZ\n"


def test_a_model_is_not_written_where_tensorflow_cannot_load_it(tmp_path):
    FLAGS.declare(EXPORT_FLAGS)
    FLAGS.set("to", str(tmp_path / "lr[0.1]"))
    with pytest.raises(FlagError, match=r"loads no model from a path with \[ or"):
        _check_folder()
    assert not list(tmp_path.iterdir())
