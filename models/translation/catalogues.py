"""Pairs of sentences from message catalogues, which translators wrote for programs.

    python -m models.translation.catalogues --source=en --target=de --to=pairs \\
        /usr/share/locale a-package.deb

writes `pairs/train.tsv` and `pairs/heldout.tsv`, with a tab between the sides, from the catalogues
in folders and Debian packages. Train on them with `--train_data` and `--heldout_data`.

A catalogue is a file LANGUAGE/LC_MESSAGES/NAME.mo. Messages of two languages belong together if
name and id are equal. Ids of most programs are the English texts, so --source=en takes them.
Messages with variables, markup or digits are left out, as are those that are equal in both
languages: a program that copies its input would translate much of them.
"""

from __future__ import annotations

import dataclasses
import functools
import gettext
import hashlib
import importlib.util
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipemesh.checkpoint.files import write_whole
from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS, Command, Flag, parse
from pipemesh.errors import DataError, MissingPackageError
from pipemesh.text import count_text

# The package with the embedded catalogues, and where they lie in it.
PACKAGE, _FOLDER = "plone.app.locales", "locales"
TRAIN, HELDOUT = "train.tsv", "heldout.tsv"
# One of this number of messages is held out.
HELDOUT_ONE_IN = 16
# Longer sides are left out by default: most are several sentences.
MOST_CHARACTERS = 60
# What copying would translate: variables, markup, numbers.
_COPIED = re.compile(r"[$%{}<>&\d]")
# The catalogues of a language, by name: texts by the ids of messages.
Catalogues = Mapping[str, Mapping[Any, str]]
_ENGLISH = "en"
# Begins an id after its context.
_CONTEXT = "\x04"


def read(path: str, languages: Iterable[str]) -> dict[str, dict[str, dict[Any, str]]]:
    """Returns the catalogues of languages in a folder or a Debian package, by language and name."""
    found: dict[str, dict[str, dict[Any, str]]] = {language: {} for language in languages}
    names = re.compile(rf"(?:^|/)({'|'.join(map(re.escape, found))})/LC_MESSAGES/([^/]+)\.mo$")
    for match, content in _files(path, names):
        try:
            # There is no public way to all messages.
            messages = vars(gettext.GNUTranslations(io.BytesIO(content)))["_catalog"]
        except (OSError, ValueError) as error:
            raise DataError(f"{match.string!r} in {path!r} is no catalogue ({error})") from error
        found[match[1]].setdefault(match[2], {}).update(messages)
    return found


def _files(path: str, names: re.Pattern[str]) -> Iterator[tuple[re.Match[str], bytes]]:
    """Yields the matching names and the contents of catalogues, in order."""
    if os.path.isdir(path):
        for folder, _, files in sorted(os.walk(path)):
            for name in sorted(files):
                whole = os.path.join(folder, name)
                # A link may lead nowhere.
                if (match := names.search(whole)) and os.path.isfile(whole):
                    with open(whole, "rb") as file:
                        yield match, file.read()
        return
    try:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", path], capture_output=True, check=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{path!r} is no folder; packages are read by dpkg-deb, which is missing"
        ) from error
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        raise DataError(f"{path!r} is neither a folder nor a Debian package ({why})") from error
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            # A link may lead out of the package.
            match = names.search(member.name) if member.isfile() else None
            if match and (file := archive.extractfile(member)):
                yield match, file.read()


def pairs_of(
    sources: Catalogues, targets: Catalogues, most: int = MOST_CHARACTERS
) -> dict[tuple[str, str], None]:
    """Returns the different pairs of two languages, each on one line, in order; without sides that
    are empty, have more than `most` characters, or are copied in part or whole.
    """
    pairs = dict[tuple[str, str], None]()
    for name, messages in sorted(targets.items()):
        for key, target in messages.items():
            sides = " ".join(sources.get(name, {}).get(key, "").split()), " ".join(target.split())
            source, target = map(normalized, sides)
            is_copied = source == target or any(map(_COPIED.search, sides))
            if source and target and not is_copied and max(map(len, sides)) <= most:
                pairs[sides] = None
    return pairs


def english(catalogues: Catalogues) -> Catalogues:
    """Returns the ids of messages as their texts; plurals have no id of their own."""

    def texts(keys: Iterable[Any]) -> Iterator[tuple[Any, str]]:
        for key in keys:
            text, form = (key, 0) if isinstance(key, str) else key
            if not form:
                yield key, text.rpartition(_CONTEXT)[2]

    return {name: dict(texts(found)) for name, found in catalogues.items()}


def split(
    pairs: Sequence[tuple[str, str]], one_in: int = HELDOUT_ONE_IN
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Divides pairs into those for training and those that are held out.

    Sides that differ in case or punctuation alone are one text. Pairs that share a text, directly
    or through others, are in the same part. So no held-out text is trained on, neither as a source
    nor as a target. A hash of a group's first text chooses the part.
    """
    parents: dict[str, str] = {}

    def root(text: str) -> str:
        while (parent := parents.setdefault(text, text)) != text:
            parents[text] = text = parents[parent]
        return text

    plain = [normalized(source) for source, _ in pairs]
    for source, (_, target) in zip(plain, pairs, strict=True):
        first, second = sorted((root(source), root(normalized(target))))
        parents[second] = first
    parts: tuple[list[tuple[str, str]], list[tuple[str, str]]] = [], []
    for source, pair in zip(plain, pairs, strict=True):
        parts[_is_chosen(root(source), one_in)].append(pair)
    return parts


def normalized(text: str) -> str:
    """Returns the words of a text without case."""
    return " ".join(re.findall(r"[^\W\d_]+", text.casefold()))


def _is_chosen(text: str, one_in: int) -> bool:
    # Python's hash() differs from process to process.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % one_in == 0


def write(paths: Sequence[str], source: str, target: str, folder: str, most: int) -> str:
    """Writes the pairs of two languages to a folder; returns their numbers in words.

    Raises:
        DataError: there are no pairs, or paths cannot be read or written.
    """
    pairs = dict[tuple[str, str], None]()
    for path in paths:
        found = read(path, (source, target))
        is_english = source == _ENGLISH and not found[source]
        sources = english(found[target]) if is_english else found[source]
        pairs |= pairs_of(sources, found[target], most)
    parts = split(list(pairs))
    if not all(parts):
        raise DataError(
            f"{' '.join(map(repr, paths))}: there are {len(pairs)} pairs of {source!r} and "
            f"{target!r}, too few to train on some and hold others out; give more catalogues"
        )
    try:
        os.makedirs(folder, exist_ok=True)
        for name, part in zip((TRAIN, HELDOUT), parts, strict=True):
            text = "".join(f"{one}\t{other}\n" for one, other in part)
            write_whole(os.path.join(folder, name), text.encode())
    except OSError as error:
        raise DataError(f"{folder!r} cannot be written to ({error.strerror})") from error
    numbers = [count_text(len(part), "pair") for part in parts]
    return f"{folder}: {numbers[0]} for training, {numbers[1]} held out"


@dataclasses.dataclass(frozen=True)
class EmbeddedPairs:
    """A function that writes the pairs of the embedded catalogues, unless that was done before, and
    returns the path of a part.

    Attributes:
        folder: the folder that they are written to.
        part: `TRAIN` or `HELDOUT`.
        languages: source and target.
    """

    folder: str
    part: str
    languages: tuple[str, str]

    def __call__(self) -> str:
        """Writes the files; raises MissingPackageError if the package is not installed."""
        folder = os.path.join(self.folder, "-".join(["pairs", *self.languages]))
        if not all(os.path.exists(os.path.join(folder, name)) for name in (TRAIN, HELDOUT)):
            write([_installed()], *self.languages, folder, MOST_CHARACTERS)
        return os.path.join(folder, self.part)


@functools.cache
def _installed() -> str:
    try:
        found = importlib.util.find_spec(PACKAGE)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise MissingPackageError("the embedded pairs", PACKAGE, "examples")
    return os.path.join(os.path.dirname(found.origin), _FOLDER)


_FLAGS = (
    Flag(
        "source",
        required=True,
        help="Language of the sources, such as en, as folders of catalogues spell it.",
    ),
    Flag("target", required=True, help="Language of the targets, such as de."),
    Flag("to", value="FOLDER", required=True, help="The folder to write to."),
    Flag("most", int, MOST_CHARACTERS, least=1, help="Maximum number of characters of a side."),
    Flag("paths", argument="+", help="Folders that have catalogues below them, or .deb files."),
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parse(argv, Command(argv[0], __doc__, _FLAGS))
    print(write(FLAGS.paths, FLAGS.source, FLAGS.target, FLAGS.to, FLAGS.most))
    return 0


if __name__ == "__main__":
    process.run(main)
