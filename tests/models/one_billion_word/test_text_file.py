"""What a file of text may be, and what is refused with a way out."""

import bz2
import gzip
import io
import lzma
import random
import shutil
import subprocess
import tarfile

import pytest
from backports import zstd
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.one_billion_word import text_file
from models.one_billion_word.corpus import CorpusError, TextFiles, corpus_from_folder

TEXT = "Gruesse \u00fc\n\u042d\u0442\u043e \u0442\u0435\u043a\u0441\u0442\n" * 400


def tar():
    """As the benchmark comes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in "ab":
            entry = tarfile.TarInfo(name)
            entry.size = len(TEXT.encode())
            archive.addfile(entry, io.BytesIO(TEXT.encode()))
    return packed.getvalue()


def write(folder, content):
    path = folder / "text"
    path.write_bytes(content)
    return str(path)


# A frame that holds no text, as pzstd writes one in front.
SKIPPABLE = b"\x52\x2a\x4d\x18\x03\x00\x00\x00abc"


@pytest.mark.parametrize(
    ("pack", "name"),
    [
        (gzip.compress, "gzip"),
        (zstd.compress, "zstd"),
        (lambda text: SKIPPABLE + zstd.compress(text) + SKIPPABLE, "zstd"),
        # `cat` of archives, the first of them empty: TensorFlow reads nothing of this.
        (lambda text: gzip.compress(b"") + gzip.compress(text), "gzip"),
        # As from a tape, on which TensorFlow stumbles.
        (lambda text: gzip.compress(text) + bytes(512), "gzip"),
    ],
)
def test_what_is_packed_is_read_whatever_it_is_called_and_has_the_digest_of_the_text(
    tmp_path, pack, name
):
    (tmp_path / "plain").write_bytes(TEXT.encode())
    # Two archives end to end are one, as `cat` makes them.
    half = TEXT.encode()[:501]
    (tmp_path / "packed").write_bytes(pack(half) + pack(TEXT.encode()[501:]))
    if pack(b"").endswith(b"\0" * 512):
        (tmp_path / "packed").write_bytes(pack(TEXT.encode()))
    plain, packed = (TextFiles((str(tmp_path / name),)) for name in ("plain", "packed"))
    assert list(packed) == list(plain) == TEXT.splitlines()
    assert packed.digest() == plain.digest()
    one, two = (text_file.scan(text.paths[0]) for text in (plain, packed))
    assert (one.packed, two.packed) == ("", name)
    assert one.size == two.size == len(TEXT.encode())


@pytest.mark.skipif(not shutil.which("zstd"), reason="the program zstd is not here")
@pytest.mark.parametrize("flags", ["-1", "-19 --long=27", "--no-check --format=zstd"])
def test_what_the_program_zstd_packs_is_read(tmp_path, flags):
    path = write(tmp_path, TEXT.encode())
    subprocess.run(["zstd", "-q", *flags.split(), path, "-o", f"{path}.zst"], check=True)
    text_file.check_head(f"{path}.zst")
    assert text_file.scan(f"{path}.zst").digest == text_file.scan(path).digest


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
        (zstd.compress(TEXT.encode("utf-16")), r"is UTF-16; "),
        (b"\x28\xb5\x2f\xfdrest", r"text' is a damaged zstd archive \(.*\); pack it again"),
        (tar(), r"is an archive of files, packed by tar; .* with: tar -xf text"),
        (gzip.compress(tar()), r"is an archive of files, packed by tar; "),
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
    text_file.scan(path)


def test_carriage_returns_alone_are_refused(tmp_path):
    path = write(tmp_path, TEXT.replace("\n", "\r").encode())
    with pytest.raises(CorpusError, match=r"800 carriage returns .* 0 newlines.*: tr '\\r' '\\n'"):
        text_file.scan(path)


def test_a_pair_that_is_cut_between_two_blocks_is_a_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(text_file, "_BLOCK", 2)
    path = write(tmp_path, b"a\r\nbc\r\nd\r\n\r\n")
    text_file.scan(path)


def zstd_with_checksum(text):
    """As the program packs, and Python does not unless it is asked to."""
    return zstd.compress(text, options={zstd.CompressionParameter.checksum_flag: True})


@pytest.mark.parametrize("pack", [gzip.compress, zstd_with_checksum])
@pytest.mark.parametrize("damage", ["cut", "flipped", "more behind"])
def test_a_damaged_archive_is_named(tmp_path, pack, damage):
    whole = pack(random.Random(0).randbytes(200_000))
    bad = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
        "more behind": whole + b"no archive",
    }
    path = write(tmp_path, bad[damage])
    match = r"text' is a damaged (gzip|zstd) archive .*; pack it again"
    with pytest.raises(CorpusError, match=match) as error:
        text_file.scan(path)
    assert "\n" not in str(error.value)


def by_lines(text):
    """What `lines` says, of all of the text at once."""
    for line in text.split(b"\n"):
        while len(line) > text_file.LONGEST_LINE:
            head = line[: text_file.LONGEST_LINE + 1]
            end = head.rfind(b" ")
            following = end + 1
            if end < 1:
                end = len(head) - 1
                while end > len(head) - 4 and line[end] & 0xC0 == 0x80:
                    end -= 1
                following = end
            yield line[:end]
            line = line[following:]
        if line:
            yield line


LETTERS = st.lists(
    st.sampled_from([b"a", b" ", b"\n", "\u00fc".encode(), b"\xff", b"bcdefgh", b"\r"])
)


@settings(deadline=None, max_examples=200)
@given(LETTERS.map(b"".join), st.integers(1, 40), st.integers(4, 12))
@example(b" aaaaaaaa", 3, 4)
@example("\U0001f600".encode() * 9, 7, 5)
def test_long_lines_are_cut_wherever_blocks_end(tmp_path_factory, content, block, longest):
    path = str(tmp_path_factory.getbasetemp() / "lines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "_BLOCK", block)
        patch.setattr(text_file, "LONGEST_LINE", longest)
        with open(path, "wb") as file:
            file.write(content)
        parts = list(text_file.lines(path))
        assert parts == list(by_lines(content))
        assert all(0 < len(part) <= longest for part in parts)
        assert b"".join(parts).replace(b" ", b"") == content.translate(None, b" \n")
        # A text of returns alone is refused.
        lines = content.replace(b"\r", b"x")
        with open(path, "wb") as file:
            file.write(lines)
        text_file._scan.cache_clear()
        is_even = all(len(line) <= longest for line in lines.split(b"\n"))
        assert text_file.scan(path).even == is_even
        # What is cut is not cut again.
        with open(path, "wb") as file:
            file.write(b"\n".join(parts))
        assert list(text_file.lines(path)) == parts


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, b"text\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)
    for read in (text_file.check_head, text_file.scan):
        with pytest.raises(
            CorpusError, match=r"text' cannot be read \(Permission denied\); make it"
        ):
            read(path)


def test_names_in_commands_may_be_pasted(tmp_path):
    for name, told in (
        ("a b", r"unxz 'a b'$"),
        ("a\nb", r"unxz FILE$"),
        ("a\udcff", r"unxz FILE$"),
    ):
        (tmp_path / name).write_bytes(lzma.compress(b""))
        with pytest.raises(CorpusError, match=told) as error:
            text_file.check_head(str(tmp_path / name))
        assert "\n" not in str(error.value) and str(error.value).isprintable()


def test_the_digest_follows_the_file(tmp_path):
    path = write(tmp_path, b"one\n")
    one = text_file.scan(path).digest
    write(tmp_path, b"one\ntwo\n")
    assert text_file.scan(path).digest != one
