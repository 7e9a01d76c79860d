"""Texts that a command line gives."""

import io
import json
import types

import pytest

from pipemesh.commands.decode import DECODE_FLAGS
from pipemesh.commands.flags import FLAGS, FlagError
from pipemesh.commands.score import SCORE_FLAGS, ended
from pipemesh.commands.texts import read_texts

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
