"""One file of text: how it is packed, whether it can be read, and what one reading says of it.

Text is UTF-8, plain or packed by gzip or zstd, whatever the file is called. A few bytes that are
not UTF-8 are replaced when the text is read; a file that is altogether something else would train
a model on noise without a word, so it is refused, and the error says how to convert it.
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

from pipemesh.errors import PipemeshError

PLAIN, GZIP, ZSTD = "", "gzip", "zstd"
_MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
# Frames that hold no text, with which some programs begin a zstd file: \x50 to \x5f, and this.
_SKIPPABLE = b"\x2a\x4d\x18"
# What other programs pack with, and how to unpack it.
_PACKED = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"7z\xbc\xaf": ("7-Zip", "7z x"),
}
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
# The longer ones first: the mark of UTF-32 begins like that of UTF-16.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_HEAD = 1 << 16
_BLOCK = 1 << 20
# A longer line is cut into parts: it bounds what is in memory, where lines are shuffled above all.
LONGEST_LINE = 1 << 14
# Of more empty lines a file is better rid before it is read again and again.
_MANY_EMPTY_LINES = 1 << 20
# More of the head than one in so many: zero bytes, or characters that are not UTF-8. The second is
# lax enough for the odd line of Latin-1 in a text that was collected from many places.
_ZEROS_ONE_IN = 50
_WRONG_ONE_IN = 10


class CorpusError(PipemeshError, ValueError):
    """The text that was asked for does not exist or cannot serve."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """What one reading of a file says of its text.

    Attributes:
        digest: a hexadecimal digest of the text: the same whether it is packed or not.
        size: how many bytes the text has, unpacked.
        packed: how the file is packed: `PLAIN`, `GZIP` or `ZSTD`.
        even: whether no line is longer than `LONGEST_LINE` and few are empty.
    """

    digest: str
    size: int
    packed: str
    even: bool


def packing(path: str) -> str:
    """How a file is packed, by its first bytes: `PLAIN`, `GZIP` or `ZSTD`."""
    with open(path, "rb") as file:
        head = file.read(4)
    if b"\x50" <= head[:1] <= b"\x5f" and head[1:] == _SKIPPABLE:
        return ZSTD
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), PLAIN)


def blocks(path: str, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a file's text, unpacked, in blocks of at most so many, or of a megabyte.

    Raises:
        CorpusError: it cannot be read, or is a damaged archive.
    """
    packed, damages = PLAIN, ()
    try:
        packed = packing(path)
        opened: Any
        if packed == GZIP:
            opened, damages = gzip.open(path), (EOFError, gzip.BadGzipFile, zlib.error)
        elif packed == ZSTD:
            from backports import zstd

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


def unreadable(path: str, error: OSError) -> CorpusError:
    """What to say of a file or folder that the system does not hand out."""
    return CorpusError(
        f"{path!r} cannot be read ({error.strerror or error}); make it readable, or take it away "
        "from the text"
    )


def check_head(path: str) -> None:
    """Checks by its first bytes that a file is text that can be read.

    Raises:
        CorpusError: it cannot be opened, is packed by something else than gzip and zstd, or is not
            UTF-8.
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
        # An ASCII character of UTF-16 is a zero byte and its code, in one order or the other.
        name = "UTF-16LE" if head[1::2].count(0) > head[::2].count(0) else "UTF-16BE"
        raise _not_utf8(path, "is full of zero bytes: UTF-16, or no text at all", name)
    text = head.decode("utf-8", "ignore")
    # Of a head that is cut, the last character may be, too.
    wrong = len(head[:-4].decode("utf-8", "replace")) - len(head[:-4].decode("utf-8", "ignore"))
    if wrong * _WRONG_ONE_IN > len(text) + wrong:
        raise _not_utf8(
            path, "is not UTF-8: another encoding, such as LATIN1 or KOI8-R, or no text", "ENCODING"
        )


def lines(path: str) -> Iterator[bytes]:
    """The lines of a file without their newlines, and without those that are empty.

    A line that is longer than `LONGEST_LINE` is given in parts. They end at spaces, which go as the
    newline does; where there is none, between two characters.

    Raises:
        CorpusError: as `blocks`.
    """
    rest = b""
    for block in blocks(path):
        *whole, rest = (rest + block).split(b"\n")
        if max(map(len, whole), default=0) > LONGEST_LINE:
            whole = itertools.chain.from_iterable(map(_cut, whole))
        yield from filter(None, whole)
        if len(rest) > LONGEST_LINE:
            # Each but the last is cut off for good: what follows does not say where.
            *parts, rest = _cut(rest)
            yield from parts
    if rest:
        yield rest


def _cut(line: bytes) -> Iterator[bytes]:
    begin = 0
    while len(line) - begin > LONGEST_LINE:
        end = line.rfind(b" ", begin + 1, begin + LONGEST_LINE + 1)
        following = end + 1
        if end < 0:
            end = begin + LONGEST_LINE
            # Not within a character of UTF-8, which has at most three such bytes.
            for _ in range(3):
                end -= line[end] & 0xC0 == 0x80
            following = end
        yield line[begin:end]
        begin = following
    yield line[begin:]


def scan(path: str) -> Scan:
    """Reads a file to its end, once a process unless it changes.

    Raises:
        CorpusError: it cannot be read, its lines end in carriage returns alone, or it is a damaged
            archive.
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
        # Where half of all bytes end lines.
        empty += ends if 2 * ends > len(block) else 0
        if b"\r" in block or last == b"\r":
            returns += block.count(b"\r")
            pairs += (last + block).count(b"\r\n")
        last = block[-1:]
        # `begin` of a line: in this block, or before it if that ended within the line.
        while not is_long and size + len(block) - begin > LONGEST_LINE:
            end = block.rfind(b"\n", max(begin - size, 0), begin + LONGEST_LINE + 1 - size)
            is_long, begin = end < 0, size + end + 1
        if b"\n" in block:
            begin = size + block.rindex(b"\n") + 1
        size += len(block)
    # Carriage returns are taken out of lines: these would all become one line.
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
