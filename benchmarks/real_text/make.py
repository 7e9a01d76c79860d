"""Makes a text of English sentences of the manuals that Debian's packages of documentation hold."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import glob
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import page

# Each package, and which of its pages are English where there are others as well.
PACKAGES = {
    "apache2-doc": "/en/",
    "bind9-doc": "",
    "clang-14-doc": "",
    "cmake-doc": "",
    "debian-handbook": "/en-US/",
    "debian-policy": "",
    "debian-reference-en": "",
    "developers-reference": "",
    "erlang-doc": "",
    "ghc-doc": "",
    "gimp-help-en": "",
    "git-doc": "",
    "installation-guide-amd64": "/en/",
    "libboost1.74-doc": "",
    "libreoffice-help-en-us": "",
    "lilypond-doc-html": "",
    "linux-doc-6.1": "",
    "llvm-14-doc": "",
    "nodejs-doc": "",
    "octave-doc": "",
    "openjdk-17-doc": "",
    "postgresql-doc-15": "",
    "python-django-doc": "",
    "python-pandas-doc": "",
    "python-scipy-doc": "",
    "python3.11-doc": "",
    "r-doc-html": "",
    "rust-doc": "",
}
# One page in so many is held out.
HELDOUT_ONE_IN = 50
# A trainer reads several files in turn.
TRAIN_FILES = 32
NOTHING = {"pages": 0, "sentences": 0, "bytes": 0}
_PAGE = re.compile(r"\.html?$")
_LETTERS = re.compile(r"[^a-z]+")
_LICENCE = re.compile(r"^License:[ \t]*(\S.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of a package.

    Attributes:
        package: name of the package.
        path: where the page lies when the package is installed.
        sentences: its English sentences, in order.
    """

    package: str
    path: str
    sentences: tuple[str, ...]

    @property
    def digest(self) -> bytes:
        """Orders and splits the pages, the same way on every machine."""
        return hashlib.sha256(f"{self.package} {self.path}".encode()).digest()

    @property
    def is_held_out(self) -> bool:
        """Whether the page is for judging."""
        return int.from_bytes(self.digest[-8:], "big") % HELDOUT_ONE_IN == 0


def same(sentence: str) -> bytes:
    """Equal for sentences that differ in case, digits and punctuation alone.

    Example:
        >>> same("See chapter 3.") == same("see Chapter 14!")
        True
    """
    letters = _LETTERS.sub("", sentence.lower())
    return hashlib.blake2b(letters.encode(), digest_size=16).digest()


def without_repetitions(pages: Iterable[Page]) -> Iterator[Page]:
    """The pages in the order of their digests, each with the sentences that no earlier one had."""
    seen: set[bytes] = set()
    for one in sorted(pages, key=lambda each: each.digest):
        fresh = []
        for sentence in one.sentences:
            key = same(sentence)
            if key not in seen:
                seen.add(key)
                fresh.append(sentence)
        if fresh:
            yield dataclasses.replace(one, sentences=tuple(fresh))


def write(pages: Iterable[Page], folder: Path) -> dict[str, dict[str, int]]:
    """Writes `train-*.txt` and `heldout-00.txt`, one sentence a line.

    Args:
        pages: in the order in which they are to be written; those to train on go to each of the
            files in turn.
        folder: where to write.

    Returns:
        For the parts `train` and `heldout`, and for each package: pages, sentences and bytes.
    """
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    names = [f"train-{number:02}.txt" for number in range(TRAIN_FILES)] + ["heldout-00.txt"]
    files = [open(folder / name, "w", encoding="utf-8", newline="\n") for name in names]
    try:
        for one in pages:
            part = "heldout" if one.is_held_out else "train"
            file = files[-1 if one.is_held_out else counts["train"]["pages"] % TRAIN_FILES]
            text = "".join(f"{sentence}\n" for sentence in one.sentences)
            file.write(text)
            for counter in counts[part], counts[one.package]:
                counter["pages"] += 1
                counter["sentences"] += len(one.sentences)
                counter["bytes"] += len(text.encode())
    finally:
        for file in files:
            file.close()
    return {name: dict(counter) for name, counter in counts.items()}


def read_package(archive: str) -> tuple[list[Page], list[str]]:
    """Reads the pages of a package's file, and the licences that its copyright file names."""
    package = os.path.basename(archive).partition("_")[0]
    english = re.compile(PACKAGES[package])
    pages, licences = [], []
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as tar,
        tarfile.open(fileobj=tar.stdout, mode="r|") as members,
    ):
        for member in members:
            if not member.isfile() or not (content := members.extractfile(member)):
                continue
            if member.name.endswith(f"/{package}/copyright"):
                licences = licences_of(content.read().decode("utf-8", "replace"))
            if _PAGE.search(member.name) and english.search(member.name):
                text = content.read().decode("utf-8", "replace")
                if sentences := page.sentences(text):
                    pages.append(Page(package, member.name, tuple(sentences)))
    return pages, licences


def licences_of(copyright_file: str) -> list[str]:
    """The licences that a copyright file names; none if it is prose, and not Debian's format."""
    if not copyright_file.startswith("Format:"):
        return []
    return sorted(set(_LICENCE.findall(copyright_file)))


def fetch(packages: Iterable[str], folder: Path) -> list[str]:
    """Downloads the packages that are not yet in the folder, and returns all files there are."""
    folder.mkdir(parents=True, exist_ok=True)
    pattern = str(folder / "{}_*.deb")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        sys.exit("no apt-get or no dpkg-deb; the packages are those of Debian 12, run this there")
    missing = [name for name in packages if not glob.glob(pattern.format(name))]
    if missing:
        status = subprocess.run(["apt-get", "download", *missing], cwd=folder).returncode
        if status:
            sys.exit(
                "apt-get download failed; the packages are those of Debian 12 and its updates, of "
                "which `apt-get update` gets the list. --packages=A,B takes others out"
            )
    return [sorted(glob.glob(pattern.format(name)))[-1] for name in packages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the text is written")
    parser.add_argument(
        "--packages", default=",".join(PACKAGES), help="some of the packages, with commas between"
    )
    arguments = parser.parse_args()
    packages = arguments.packages.split(",")
    if unknown := [name for name in packages if name not in PACKAGES]:
        parser.error(f"--packages has {unknown[0]!r}; known are {', '.join(PACKAGES)}")
    archives = fetch(packages, arguments.folder / "packages")
    # The largest first: the others fill up what time is left.
    archives.sort(key=os.path.getsize, reverse=True)
    with multiprocessing.Pool() as pool:
        found = list(pool.imap(read_package, archives))
    counts = write(
        without_repetitions(one for pages, _ in found for one in pages), arguments.folder
    )
    summary = summary_of(archives, found, counts)
    (arguments.folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    report(summary)


def summary_of(
    archives: list[str],
    found: list[tuple[list[Page], list[str]]],
    counts: dict[str, dict[str, int]],
) -> dict[str, Any]:
    """What the text is made of: each part's and each package's size, versions and licences."""
    packages = {}
    for archive, (_, licences) in zip(archives, found, strict=True):
        name, version, _ = os.path.basename(archive).split("_")
        version = version.replace("%3a", ":")
        packages[name] = {"version": version, "licences": licences, **counts.get(name, NOTHING)}
    parts = {part: counts.get(part, NOTHING) for part in ("train", "heldout")}
    return {**parts, "packages": packages}


def report(summary: dict[str, Any]) -> None:
    print("| package | version | pages | sentences | MB |\n|---|---|--:|--:|--:|")
    rows = sorted(summary["packages"].items(), key=lambda row: -row[1]["bytes"])
    rows += [(part, summary[part]) for part in ("train", "heldout")]
    for name, row in rows:
        print(
            f"| {name} | {row.get('version', '')} | {row['pages']:,} | {row['sentences']:,} "
            f"| {row['bytes'] / 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
