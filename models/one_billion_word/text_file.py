"""One file of text: how it is packed, whether it can be read, and a digest of what it says.

Text is UTF-8, plain or packed by gzip, whatever the file is called. A few bytes that are not UTF-8
are replaced when the text is read; a file that is altogether something else would train a model on
noise without a word, so it is refused, and the error says how to convert it.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import zlib

from pipemesh.errors import PipemeshError

PLAIN, GZIP = "", "GZIP"
_GZIP_MAGIC = b"\x1f\x8b"
# What other programs pack with, and how to unpack it.
_PACKED = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"7z\xbc\xaf": ("7-Zip", "7z x"),
}
# The longer ones first: the mark of UTF-32 begins like that of UTF-16.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_HEAD = 1 << 16
_BLOCK = 1 << 20
# More of the head than one in so many: zero bytes, or characters that are not UTF-8. The second is
# lax enough for the odd line of Latin-1 in a text that was collected from many places.
_ZEROS_ONE_IN = 50
_WRONG_ONE_IN = 10


class CorpusError(PipemeshError, ValueError):
    """The text that was asked for does not exist or cannot serve."""


def compression(path: str) -> str:
    """How a file is packed, by its first bytes: `GZIP`, or `PLAIN`."""
    with open(path, "rb") as file:
        return GZIP if file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC else PLAIN


def open_text(path: str) -> gzip.GzipFile | io.BufferedReader:
    """Opens a file for reading the bytes of its text."""
    return gzip.open(path) if compression(path) == GZIP else open(path, "rb")


def check_head(path: str) -> None:
    """Checks by its first bytes that a file is text that can be read.

    Raises:
        CorpusError: it is packed by something else than gzip, or is not UTF-8.
    """
    with open(path, "rb") as file:
        magic = file.read(8)
    for begin, (name, program) in _PACKED.items():
        if magic.startswith(begin):
            raise CorpusError(
                f"{path!r} is packed by {name}; plain text and gzip are read. Unpack it first, "
                f"with: {program} {os.path.basename(path)}"
            )
    try:
        with open_text(path) as file:
            head = file.read(_HEAD)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, error) from error
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


def digest(path: str) -> str:
    """A hexadecimal digest of what a file says: the same whether it is packed or not.

    The file is read to its end, once a process unless it changes.

    Raises:
        CorpusError: its lines end in carriage returns alone, or it is a damaged archive.
    """
    status = os.stat(path)
    return _digest(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _digest(path: str, _size: int, _changed: int) -> str:
    found = hashlib.sha256()
    newlines = returns = pairs = 0
    last = b""
    try:
        with open_text(path) as file:
            while block := file.read(_BLOCK):
                found.update(block)
                newlines += block.count(b"\n")
                if b"\r" in block or last == b"\r":
                    returns += block.count(b"\r")
                    pairs += (last + block).count(b"\r\n")
                last = block[-1:]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, error) from error
    # Carriage returns are taken out of lines: these would all become one line.
    if returns - pairs > newlines:
        raise CorpusError(
            f"{path!r} has {returns - pairs} carriage returns that end no line and {newlines} "
            f"newlines; lines must end in a newline. Convert it: tr '\\r' '\\n' < "
            f"{os.path.basename(path)} > converted.txt"
        )
    return found.hexdigest()


def _not_utf8(path: str, what: str, encoding: str) -> CorpusError:
    return CorpusError(
        f"{path!r} {what}; text must be UTF-8. Convert it: iconv -f {encoding} -t UTF-8 "
        f"{os.path.basename(path)} > converted.txt"
    )


def _damaged(path: str, error: Exception) -> CorpusError:
    return CorpusError(f"{path!r} is a damaged gzip archive ({error}); pack it again")
