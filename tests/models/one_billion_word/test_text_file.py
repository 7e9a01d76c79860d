"""Files of text: kinds, archives, folders and patterns, and copies."""

import bz2
import gzip
import io
import lzma
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from backports import zstd
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.one_billion_word import text_copy, text_folder
from models.one_billion_word.corpus import CorpusError, TextFiles, corpus_from_folder
from pipemesh.data import text_file

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


def write_to(path, content):
    path.write_bytes(content)
    return str(path)


def write(folder, content):
    return write_to(folder / "text", content)


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


@pytest.mark.parametrize("content", [TEXT, TEXT.replace("\n", "\r\n"), f"\ufeff{TEXT}"])
def test_neither_carriage_returns_before_newlines_nor_a_byte_order_mark_are_text(tmp_path, content):
    path = write(tmp_path, content.encode())
    text_file.check_head(path)
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


def names(folder, pattern):
    return [os.path.relpath(path, folder) for path in text_folder.files(str(folder), pattern)]


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep er/d.txt", ".git/e.txt", "sub/f.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/c.txt", "sub/deep er/d.txt"]),
        ("sub/**/*.txt", ["sub/c.txt", "sub/deep er/d.txt"]),
        ("**/deep*/**/*.txt", ["sub/deep er/d.txt"]),
        ("**", ["a.txt", "b.txt", "sub/c.txt", "sub/deep er/d.txt", "sub/f.md"]),
        ("*/c.txt", ["sub/c.txt"]),
        (".git/*", [".git/e.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("sub", []),
        ("missing/**/*.txt", []),
    ],
)
def test_patterns(tree, pattern, found):
    assert names(tree, pattern) == found


def test_links_that_lead_back_are_followed_once(tree):
    """With two of them `glob` had 2^40 paths to look at."""
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "deep er" / "up").symlink_to(tree / "sub")
    assert names(tree, "**/*.txt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep er/d.txt"]


def test_links_lead_elsewhere_and_a_file_of_two_names_is_read_once(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "g.txt").write_text("text\n")
    (tree / "linked").symlink_to(elsewhere)
    (tree / "again.txt").symlink_to(tree / "a.txt")
    assert names(tree, "*.txt") == ["a.txt", "b.txt"]
    assert names(tree, "linked/*") == ["linked/g.txt"]
    assert "linked/g.txt" in names(tree, "**/*.txt")


@pytest.mark.parametrize("pattern", ["*", "**/*", "train"])
def test_what_is_matched_and_is_no_file_is_told(tree, pattern):
    (tree / "train").symlink_to(tree / "unmounted")
    with pytest.raises(CorpusError, match=r"train' is a link to nothing; take it away"):
        text_folder.files(str(tree), pattern)
    (tree / "train").unlink()
    os.mkfifo(tree / "train")
    with pytest.raises(CorpusError, match=r"train' is no file of text; take it away"):
        text_folder.files(str(tree), pattern)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_text_that_is_there_packed_and_unpacked_is_told(tree, ending):
    """As `gunzip --keep` leaves it; it was trained on twice as often as the rest."""
    (tree / f"b.txt{ending}").write_text("text\n")
    assert names(tree, "*.txt") == ["a.txt", "b.txt"]
    with pytest.raises(CorpusError, match=rf"b.txt' is there twice, .* as '.*b.txt{ending}'; take"):
        text_folder.files(str(tree), "*")


def test_a_folder_that_cannot_be_listed_is_told(tree, monkeypatch):
    real = os.scandir

    def scandir(path="."):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CorpusError, match=r"sub' cannot be read \(Permission denied\)"):
        text_folder.files(str(tree), "**/*.txt")

    def listdir(path="."):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(CorpusError, match=r"cannot be read \(Permission denied\)"):
        text_folder.check(str(tree))


def test_names_of_any_bytes(tmp_path):
    folder = tmp_path / "a\udcff\nb [1]*"
    folder.mkdir()
    odd = ["plain", "with space", "[x]", "new\nline", "not\udcfeutf8", "~", "$HOME", "-n", "a:b"]
    for number, name in enumerate(odd):
        (folder / name).write_text(f"text {number}\n")
    (folder / "held out").write_text("judge\n")
    corpus = corpus_from_folder(str(folder), "[!h]*", "held out")
    assert sorted(corpus.train) == sorted(f"text {number}" for number in range(len(odd)))
    assert corpus.name.isprintable(), "it is printed"


@pytest.mark.slow
def test_more_files_than_may_be_open(tmp_path):
    for number in range(2_000):
        (tmp_path / f"train-{number}").write_bytes(b"" if number % 7 == 0 else b"a line of text\n")
    (tmp_path / "heldout").write_text("judge\n")
    corpus = corpus_from_folder(str(tmp_path), "train-*", "heldout")
    assert len(corpus.train.paths) == 2_000 - 286, "those with text"
    assert len(list(corpus.train.sample(600))) == 600
    assert len(corpus.train.digest()) == 64


COPIED = b"".join(b"sentence %d\n\n" % number for number in range(9000))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "pipemesh" / "text"


def test_only_packed_text_has_a_copy_one_however_it_is_packed_and_wherever_it_is(cache, tmp_path):
    path = write_to(tmp_path / "text", COPIED)
    assert text_copy.readable(path) == path
    assert not cache.exists()
    (tmp_path / "elsewhere").mkdir()
    paths = [
        write_to(tmp_path / "a.zst", zstd.compress(COPIED)),
        write_to(
            tmp_path / "elsewhere" / "b", zstd.compress(COPIED[:99]) + zstd.compress(COPIED[99:])
        ),
        write_to(tmp_path / "c.gz", gzip.compress(b"") + gzip.compress(COPIED) + bytes(100)),
    ]
    copies = {text_copy.readable(path) for path in paths}
    (copy,) = copies
    assert os.listdir(cache) == [os.path.basename(copy)]
    assert pathlib.Path(copy).read_bytes() == COPIED, "byte for byte, so that places in it agree"
    written = os.stat(copy).st_mtime_ns
    assert text_copy.readable(paths[0]) == copy
    assert os.stat(copy).st_mtime_ns == written


@pytest.mark.parametrize("pack", [bytes, zstd.compress])
def test_long_lines_are_cut_and_floods_of_empty_lines_thinned(cache, tmp_path, pack):
    long = b"ab " * 99_999
    flood = b"\n" * (1 << 22)
    for name, content, lines in (
        ("long", b"a\n\n" + long + b"\nb", None),
        ("flood", b"a\n" + flood + b"b\r\n", [b"a", b"b\r"]),
    ):
        copy = text_copy.readable(write_to(tmp_path / name, pack(content)))
        assert copy.startswith(str(cache))
        got = pathlib.Path(copy).read_bytes().split(b"\n")
        assert got.pop() == b"" and all(got)
        assert got == (lines or [b"a", *got[1:-1], b"b"])
        assert max(map(len, got)) <= text_file.LONGEST_LINE
        assert b" ".join(got[1:-1]) == (long if lines is None else b"")
        assert list(TextFiles((str(tmp_path / name),))) == list(TextFiles((copy,)))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_copy_is_made_again(cache, tmp_path, damage):
    path = write_to(tmp_path / "a.zst", zstd.compress(COPIED))
    copy = pathlib.Path(text_copy.readable(path))
    bad = {"cut": COPIED[:-1], "flipped": COPIED[:-1] + b"?", "empty": b""}[damage]
    copy.write_bytes(bad)
    assert text_copy.readable(path) == str(copy)
    assert copy.read_bytes() == COPIED


def test_what_was_not_finished_is_removed_and_what_is_being_written_is_not(cache, tmp_path):
    path = write_to(tmp_path / "a.zst", zstd.compress(COPIED))
    cache.mkdir(parents=True)
    write_to(cache / ".killed.part", b"half")
    others = write_to(cache / "what is not ours", b"")
    with text_copy._locked(str(cache / ".writing.part")) as file:
        file.write(b"half")
        text_copy.readable(path)
        assert sorted(os.listdir(cache))[0] == ".writing.part"
        assert len(os.listdir(cache)) == 3 and os.path.exists(others)
    assert len(os.listdir(cache)) == 2


def test_of_many_at_once_one_writes(cache, tmp_path, monkeypatch):
    paths = [write_to(tmp_path / f"{number}.zst", zstd.compress(COPIED)) for number in range(16)]
    written = []
    real = text_copy._write

    def counted(*arguments):
        written.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(text_copy, "_write", counted)
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(text_copy.readable, paths))
    assert len(copies) == len(written) == 1
    assert os.listdir(cache) == [os.path.basename(*copies)]


def test_a_folder_that_cannot_hold_it_is_told_in_a_line(tmp_path, monkeypatch):
    path = write_to(tmp_path / "a.zst", zstd.compress(COPIED))
    monkeypatch.setenv("XDG_CACHE_HOME", write_to(tmp_path / "file", b""))
    match = (
        r"a.zst' has to be copied to be read, .* which fails in '.*/file/pipemesh/text' \(Not a "
    )
    with pytest.raises(CorpusError, match=match + r".*\); make room, or .* XDG_CACHE_HOME$"):
        TextFiles((path,)).digest()


# A limit on the size of files stands for a full disk.
FULL = """
import resource, signal, sys
from models.one_billion_word import text_copy
from models.one_billion_word.corpus import CorpusError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    text_copy.readable(sys.argv[1])
except CorpusError as error:
    print(error)
"""


def test_a_full_disk_is_told_in_a_line_and_nothing_is_left(cache, tmp_path):
    path = write_to(tmp_path / "a.zst", zstd.compress(COPIED))
    ran = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True
    )
    assert "has to be copied to be read, 1" in ran.stdout and "(File too large)" in ran.stdout
    assert len(ran.stdout.splitlines()) == 1
    assert os.listdir(cache) == []


# Killed at the worst moment, after all is written.
KILLED = """
import os, signal, sys
from models.one_billion_word import text_copy
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
text_copy.readable(sys.argv[1])
"""


def test_a_kill_leaves_nothing_that_is_taken_for_a_copy(cache, tmp_path):
    path = write_to(tmp_path / "a.zst", zstd.compress(COPIED))
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -9
    (left,) = os.listdir(cache)
    assert left.endswith(".part")
    copy = text_copy.readable(path)
    assert os.listdir(cache) == [os.path.basename(copy)]


def test_text_that_changes_while_it_is_copied_is_told(cache, tmp_path, monkeypatch):
    path = write_to(tmp_path / "a.zst", zstd.compress(COPIED))
    real = text_file.blocks

    def blocks(read):
        write_to(tmp_path / "a.zst", zstd.compress(b"other"))
        return real(read)

    text_file.scan(path)
    monkeypatch.setattr(text_file, "blocks", blocks)
    with pytest.raises(CorpusError, match=r"^'[^']*a\.zst' changed while it was read; run"):
        text_copy.readable(path)
    assert os.listdir(cache) == []
