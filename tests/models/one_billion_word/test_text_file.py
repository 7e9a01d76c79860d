"""What a file of text may be, and what is refused with a way out."""

import bz2
import gzip
import lzma

import pytest

from models.one_billion_word import text_file
from models.one_billion_word.corpus import CorpusError, TextFiles, corpus_from_folder

TEXT = "Gruesse \u00fc\n\u042d\u0442\u043e \u0442\u0435\u043a\u0441\u0442\n" * 400


def write(folder, content):
    path = folder / "text"
    path.write_bytes(content)
    return str(path)


def test_gzip_is_read_whatever_the_file_is_called_and_has_the_digest_of_the_text(tmp_path):
    (tmp_path / "plain").write_bytes(TEXT.encode())
    # Two archives end to end are one, as `cat` makes them.
    half = TEXT.encode()[:501]
    (tmp_path / "packed").write_bytes(gzip.compress(half) + gzip.compress(TEXT.encode()[501:]))
    plain, packed = (TextFiles((str(tmp_path / name),)) for name in ("plain", "packed"))
    assert list(packed) == list(plain) == TEXT.splitlines()
    assert packed.digest() == plain.digest()
    assert (plain.compressions(), packed.compressions()) == ([""], ["GZIP"])


def test_a_byte_order_mark_of_utf8_is_no_text(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + TEXT.encode())
    text_file.check_head(path)
    assert list(TextFiles((path,))) == TEXT.splitlines()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (TEXT.encode("utf-16"), r"is UTF-16; text must be UTF-8\. .*: iconv -f UTF-16 -t UTF-8"),
        (TEXT.encode("utf-32"), r"is UTF-32; .*: iconv -f UTF-32 "),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), r"is UTF-16; "),
        (b"some text\n".decode().encode("utf-16-le"), r"zero bytes: .*: iconv -f UTF-16LE "),
        (b"some text\n".decode().encode("utf-16-be"), r"zero bytes: .*: iconv -f UTF-16BE "),
        (TEXT.encode("koi8-r", "ignore"), r"is not UTF-8: .*: iconv -f ENCODING -t UTF-8"),
        (gzip.compress(TEXT.encode("utf-16")), r"is UTF-16; "),
        (bz2.compress(TEXT.encode()), r"is packed by bzip2; .* with: bunzip2 text"),
        (lzma.compress(TEXT.encode()), r"is packed by xz; .* with: unxz text"),
        (b"PK\x03\x04rest", r"is packed by zip; .* with: unzip text"),
        (b"\x28\xb5\x2f\xfdrest", r"is packed by zstd; "),
    ],
)
def test_what_is_no_utf8_is_refused(tmp_path, content, match):
    path = write(tmp_path, content)
    with pytest.raises(CorpusError, match=match):
        text_file.check_head(path)
    (tmp_path / "good").write_text("a\n")
    with pytest.raises(CorpusError, match=match):
        corpus_from_folder(str(tmp_path), "text", "good")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a",
        TEXT.encode()[:-2],
        "Stra\u00dfe, caf\u00e9, pleasant words that are ASCII\n".encode("latin-1") * 9,
        b"one \x00 zero byte in a line of a text is not so bad that we would refuse it\n",
        ("x" + "\u20ac" * 30000).encode(),
    ],
)
def test_what_is_nearly_utf8_serves(tmp_path, content):
    text_file.check_head(write(tmp_path, content))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_in_newlines_with_or_without_a_carriage_return(tmp_path, end):
    path = write(tmp_path, TEXT.replace("\n", end).encode())
    assert list(TextFiles((path,))) == TEXT.splitlines()
    text_file.digest(path)


def test_carriage_returns_alone_are_refused(tmp_path):
    path = write(tmp_path, TEXT.replace("\n", "\r").encode())
    with pytest.raises(CorpusError, match=r"800 carriage returns .* 0 newlines.*: tr '\\r' '\\n'"):
        text_file.digest(path)


def test_a_pair_that_is_cut_between_two_blocks_is_a_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(text_file, "_BLOCK", 2)
    path = write(tmp_path, b"a\r\nbc\r\nd\r\n\r\n")
    text_file.digest(path)


def test_a_damaged_archive_is_named(tmp_path):
    whole = gzip.compress(bytes(range(256)) * 999)
    path = write(tmp_path, whole[: len(whole) // 2])
    with pytest.raises(CorpusError, match=r"text' is a damaged gzip archive .*; pack it again"):
        text_file.digest(path)


def test_the_digest_follows_the_file(tmp_path):
    path = write(tmp_path, b"one\n")
    one = text_file.digest(path)
    write(tmp_path, b"one\ntwo\n")
    assert text_file.digest(path) != one
