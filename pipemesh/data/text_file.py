"""A text file: its packing, its validity, and the result of reading it once.

Text is UTF-8, plain or packed by gzip or zstd, whatever the name of the file. A few bytes that are
not UTF-8 are replaced. Any other kind of file would train a model on noise, so it is refused, and
the error explains how to convert it.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import itertools
import os
import shlex
import zlib
from collections.abc import Iterator
from typing import Any

from pipemesh.errors import DataError, needed

PLAIN, GZIP, ZSTD = "", "gzip", "zstd"
_MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
# Skippable frames, with which some programs start a zstd file: \x50 to \x5f, and this.
_SKIPPABLE = b"\x2a\x4d\x18"
# Unsupported kinds of packing, and the program that unpacks each.
_PACKED = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"7z\xbc\xaf": ("7-Zip", "7z x"),
}
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
# Longer marks come first: the mark of UTF-32 starts like that of UTF-16.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_HEAD = 1 << 16
_BLOCK = 1 << 20
# Longer lines are cut into parts, which bounds memory, above all where lines are shuffled.
LONGEST_LINE = 1 << 14
# A file with more empty lines is copied without them, because it is read repeatedly.
_MANY_EMPTY_LINES = 1 << 20
# Limits for zero bytes, and for characters that are not UTF-8, in the start of a file. The second
# allows a few lines of Latin-1 in text collected from many sources.
_ZEROS_ONE_IN = 50
_WRONG_ONE_IN = 10


class CorpusError(DataError, ValueError):
    """The text does not exist or is unusable."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """The result of reading a file once.

    Attributes:
        digest: a hexadecimal digest of the unpacked text.
        size: number of bytes in the unpacked text.
        packed: the packing: `PLAIN`, `GZIP` or `ZSTD`.
        even: whether no line is longer than `LONGEST_LINE` and few are empty.
    """

    digest: str
    size: int
    packed: str
    even: bool


def packing(path: str) -> str:
    """Returns the packing of a file by its first bytes: `PLAIN`, `GZIP` or `ZSTD`."""
    with open(path, "rb") as file:
        head = file.read(4)
    if b"\x50" <= head[:1] <= b"\x5f" and head[1:] == _SKIPPABLE:
        return ZSTD
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), PLAIN)


def blocks(path: str, size: int | None = None) -> Iterator[bytes]:
    """Yields the unpacked bytes of a file in blocks of at most `size`, by default a megabyte.

    It raises CorpusError if the file cannot be read, or is a damaged archive.
    """
    packed, damages = PLAIN, ()
    try:
        packed = packing(path)
        opened: Any
        if packed == GZIP:
            opened, damages = gzip.open(path), (EOFError, gzip.BadGzipFile, zlib.error)
        elif packed == ZSTD:
            zstd = needed("backports.zstd", repr(path), "data", "backports.zstd")
            opened, damages = zstd.open(path), (EOFError, zstd.ZstdError)
        else:
            opened = open(path, "rb")
        with opened:
            while block := opened.read(size or _BLOCK):
                yield block
    except damages as error:
        raise CorpusError(
            f"{path!r} is a damaged {packed} archive ({error}); pack it again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def whole(path: str) -> str:
    """Returns the text of a file. Errors are those of `blocks`, and CorpusError for other text than
    UTF-8.
    """
    try:
        return b"".join(blocks(path)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path!r} cannot be read ({error}); text must be UTF-8") from error


def unreadable(path: str, error: OSError) -> CorpusError:
    """Returns the error for a file or folder that the system cannot read."""
    return CorpusError(
        f"{path!r} cannot be read ({error.strerror or error}); make it readable, or leave it out"
    )


def check_head(path: str) -> None:
    """Raises CorpusError if the first bytes of a file are not readable UTF-8 text, plain, gzip or
    zstd.
    """
    head = next(blocks(path, _HEAD), b"")
    for begin, (name, program) in _PACKED.items():
        if head.startswith(begin):
            raise CorpusError(
                f"{path!r} is packed by {name}; plain text, gzip and zstd are read. Unpack it "
                f"first, with: {program} {_in_shell(path)}"
            )
    if head.startswith(_TAR_MAGIC, _TAR_MAGIC_AT):
        raise CorpusError(
            f"{path!r} is an archive of files, packed by tar; text is read file by file. Unpack it "
            f"first, with: tar -xf {_in_shell(path)}"
        )
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            raise _not_utf8(path, f"is {name}", name)
    if head.count(0) * _ZEROS_ONE_IN > len(head):
        # In UTF-16 an ASCII character is a zero byte and its code, in either order.
        name = "UTF-16LE" if head[1::2].count(0) > head[::2].count(0) else "UTF-16BE"
        raise _not_utf8(path, "is full of zero bytes: UTF-16, or no text at all", name)
    text = head.decode("utf-8", "ignore")
    # The end of the head may cut a character.
    wrong = len(head[:-4].decode("utf-8", "replace")) - len(head[:-4].decode("utf-8", "ignore"))
    if wrong * _WRONG_ONE_IN > len(text) + wrong:
        raise _not_utf8(
            path, "is not UTF-8: another encoding, such as LATIN1 or KOI8-R, or no text", "ENCODING"
        )


def lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a file without newlines, and without empty lines.

    A line longer than `LONGEST_LINE` is yielded in parts, cut at spaces, which are dropped like
    newlines, or without spaces between two characters. Errors are those of `blocks`.
    """
    rest = b""
    for block in blocks(path):
        *whole, rest = (rest + block).split(b"\n")
        if max(map(len, whole), default=0) > LONGEST_LINE:
            whole = itertools.chain.from_iterable(map(_cut, whole))
        yield from filter(None, whole)
        if len(rest) > LONGEST_LINE:
            # All parts but the last are final: their cuts do not depend on later text.
            *parts, rest = _cut(rest)
            yield from parts
    if rest:
        yield rest


def whole_lines(path: str) -> Iterator[bytes]:
    """Yields all lines of a file without newlines, however long. Errors are those of `blocks`."""
    rest = b""
    for block in blocks(path):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _cut(line: bytes) -> Iterator[bytes]:
    begin = 0
    while len(line) - begin > LONGEST_LINE:
        end = line.rfind(b" ", begin + 1, begin + LONGEST_LINE + 1)
        following = end + 1
        if end < 0:
            end = begin + LONGEST_LINE
            # Do not cut inside a UTF-8 character, which has at most three continuation bytes.
            for _ in range(3):
                end -= line[end] & 0xC0 == 0x80
            following = end
        yield line[begin:end]
        begin = following
    yield line[begin:]


def scan(path: str) -> Scan:
    """Reads a file to its end, once in a process unless it changes.

    It raises CorpusError if the file cannot be read, is a damaged archive, or has only carriage
    returns as line ends.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return _scan(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.cache
def _scan(path: str, _inode: int, _size: int, _changed: int) -> Scan:
    found = hashlib.sha256()
    size = newlines = returns = pairs = empty = 0
    last = b""
    begin, is_long = 0, False
    for block in blocks(path):
        found.update(block)
        ends = block.count(b"\n")
        newlines += ends
        # Count empty lines only in blocks where at least half of all bytes are newlines.
        empty += ends if 2 * ends > len(block) else 0
        if b"\r" in block or last == b"\r":
            returns += block.count(b"\r")
            pairs += (last + block).count(b"\r\n")
        last = block[-1:]
        # `begin` is the start of a line, in this block or before it.
        while not is_long and size + len(block) - begin > LONGEST_LINE:
            end = block.rfind(b"\n", max(begin - size, 0), begin + LONGEST_LINE + 1 - size)
            is_long, begin = end < 0, size + end + 1
        if b"\n" in block:
            begin = size + block.rindex(b"\n") + 1
        size += len(block)
    # Carriage returns are removed, so these lines would become a single line.
    if returns - pairs > newlines:
        raise CorpusError(
            f"{path!r} has {returns - pairs} carriage returns that end no line and {newlines} "
            f"newlines; lines must end in a newline. Convert it: tr '\\r' '\\n' < "
            f"{_in_shell(path)} > converted.txt"
        )
    even = not is_long and empty <= _MANY_EMPTY_LINES
    return Scan(found.hexdigest(), size, packing(path), even)


def _not_utf8(path: str, what: str, encoding: str) -> CorpusError:
    return CorpusError(
        f"{path!r} {what}; text must be UTF-8. Convert it: iconv -f {encoding} -t UTF-8 "
        f"{_in_shell(path)} > converted.txt"
    )


def _in_shell(path: str) -> str:
    name = os.path.basename(path)
    return shlex.quote(name) if name.isprintable() else "FILE"
