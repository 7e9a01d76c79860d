#!/usr/bin/env python3
"""Makes and checks a release: source archive, wheel and documentation, in dist/.

    make release              # of the tag of HEAD, such as v0.1.0
    make release REHEARSE=1   # the same without a tag, as each change is checked

The tag is the version; the sources say a version of development, which is replaced in a copy.
Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME = "pipemesh_lingvo"
# Versions without an epoch or local parts: 0.1.0, and 0.1.0a1, 0.1.0b2 or 0.1.0rc1 before it.
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
STAMPED = {
    "pipemesh/__init__.py": re.compile(r'(?m)^(__version__ = ").*(")$'),
    "CITATION.cff": re.compile(r"(?m)^(version: ).*()$"),
}
UNRELEASED = "Unreleased"
# What is made in a checkout and not part of it.
MADE = (".git", ".venv", "_build", "dist", "runs", "__pycache__", "*.egg-info", ".*cache", ".torch")


class ReleaseError(Exception):
    """A state of the repository that is no release."""


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rehearse", action="store_true", help="make what has no tag yet")
    parser.add_argument("--only_check", action="store_true", help="build nothing")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    try:
        version = version_of(options.folder, options.rehearse)
        check_changelog(options.folder, None if options.rehearse else version)
        print(f"{version}: {'' if options.rehearse else 'tag and '}changelog checked", flush=True)
        if not options.only_check:
            make(options.folder, version, options.rehearse)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def version_of(folder: pathlib.Path, rehearse: bool) -> str:
    """Returns the version of the tag of HEAD, or in a rehearsal that of the sources."""
    source = (folder / "pipemesh/__init__.py").read_text(encoding="utf-8")
    said = re.search(r'(?m)^__version__ = "(.*)"$', source)
    assert said
    if rehearse:
        return said[1]
    if changed := run(["git", "status", "--porcelain"], folder):
        raise ReleaseError(f"files differ from HEAD; commit them or put them back:\n{changed}")
    tags = run(["git", "tag", "--points-at", "HEAD"], folder).split()
    versions = [found[1] for tag in tags if (found := TAG.fullmatch(tag))]
    if len(versions) != 1:
        raise ReleaseError(
            f"HEAD has the tags {', '.join(tags) or 'none'}, and needs one such as v0.1.0 or "
            "v0.1.0rc1, which names the version; `git tag v0.1.0`, or make release REHEARSE=1"
        )
    return versions[0]


def check_changelog(folder: pathlib.Path, version: str | None) -> None:
    """Checks that the changelog begins with the changes of a version and its day; in a rehearsal
    (None) it may begin with those that have none yet.
    """
    text = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"(?ms)^## (.+?)\n(.*?)(?=^## |\Z)", text)
    wanted = f"`## {version or '0.1.0'} (YYYY-MM-DD)`"
    if sections and sections[0][0] == UNRELEASED:
        unreleased = re.search(r"(?m)^\* ", sections[0][1])
        if version is None and (unreleased or sections[1:]):
            return
        if unreleased:
            raise ReleaseError(
                f"CHANGELOG.md has changes under `## {UNRELEASED}`; give them the title {wanted}"
            )
        sections = sections[1:]
    title, changes = sections[0] if sections else ("", "")
    name = r"\S+" if version is None else re.escape(version)
    if not re.fullmatch(rf"{name} \(\d{{4}}-\d\d-\d\d\)", title):
        raise ReleaseError(f"CHANGELOG.md begins with the section `## {title}`, and not {wanted}")
    if not re.search(r"(?m)^\* ", changes):
        raise ReleaseError(f"CHANGELOG.md: `## {title}` names no change; each is a line `* ...`")


def make(folder: pathlib.Path, version: str, rehearse: bool) -> None:
    """Makes the files of a version, and tries them."""
    dist = folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        tools, copy = pathlib.Path(work, "tools"), pathlib.Path(work, "copy")
        exported(folder, copy, version, rehearse)
        venv.create(tools, with_pip=True)
        python = str(tools / "bin/python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, "build>=1.2", "twine>=6"], folder)
        # The wheel is built from the source archive, so that has all it needs.
        run([python, "-m", "build", "--outdir", str(dist), str(copy)], folder)
        files = sorted(dist.iterdir())
        expected = [f"{NAME}-{version}-py3-none-any.whl", f"{NAME}-{version}.tar.gz"]
        if [file.name for file in files] != expected:
            raise ReleaseError(f"built were {files}, and not {expected}")
        print(run([python, "-m", "twine", "check", "--strict", *map(str, files)], folder))
        earlier = [] if rehearse else versions_before(folder)
        documentation(copy, dist, [version, *earlier])
    subprocess.run([".ci/wheel", str(dist / expected[0])], cwd=folder, check=True)
    for file in sorted(dist.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.relative_to(folder)}  {file.stat().st_size:,} bytes  sha256 {digest}")


def exported(folder: pathlib.Path, copy: pathlib.Path, version: str, rehearse: bool) -> None:
    """Copies what HEAD has, in a rehearsal what the folder has, and writes the version into it."""
    if rehearse:
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*MADE))
    else:
        copy.mkdir()
        command = ["git", "archive", "HEAD"]
        archive = subprocess.run(command, cwd=folder, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=copy, check=True, input=archive.stdout)
    for name, pattern in STAMPED.items():
        path = copy / name
        text, number = pattern.subn(rf"\g<1>{version}\g<2>", path.read_text(encoding="utf-8"))
        if number != 1:
            raise ReleaseError(f"{name} has {number} lines with a version, and not one")
        path.write_text(text, encoding="utf-8")


def versions_before(folder: pathlib.Path) -> list[str]:
    """Returns the versions that HEAD has behind it, and its own, the newest first."""
    before = [word for mark in ("a", "b", "rc") for word in ("-c", f"versionsort.suffix={mark}")]
    words = ["tag", "--merged", "HEAD", "--sort=-version:refname"]
    tags = run(["git", *before, *words], folder).split()
    return [found[1] for tag in tags if (found := TAG.fullmatch(tag))]


def documentation(copy: pathlib.Path, dist: pathlib.Path, versions: Sequence[str]) -> None:
    """Archives the pages of the first of some versions, in a folder of its own, and a list of all:
    archives of several versions unpack into one folder.
    """
    pages = copy / "docs/_build"
    environment = {**os.environ, "PYTHONPATH": str(copy), "TF_CPP_MIN_LOG_LEVEL": "2"}
    words = ["-b", "html", "-c", "docs", "-d", f"{copy}/.doctrees", "-W", "-n", "-q", "."]
    sphinx = [sys.executable, "-m", "sphinx", *words, str(pages)]
    subprocess.run(sphinx, cwd=copy, env=environment, check=True)
    page = copy / "versions.html"
    links = "\n".join(
        f'<li><a href="{html.escape(name)}/index.html">{html.escape(name)}</a></li>'
        for name in dict.fromkeys(versions)
    )
    title = "Documentation of pipemesh"
    page.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<h1>{title}</h1>\n<ul>\n{links}\n</ul>\n",
        encoding="utf-8",
    )
    with tarfile.open(dist / f"{NAME}-{versions[0]}-docs.tar.gz", "w:gz") as archive:
        archive.add(pages, versions[0])
        archive.add(page, "index.html")


def run(command: Sequence[str], folder: pathlib.Path) -> str:
    """Runs a command and returns what it says; an error has all of it."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
